"""``health()``: the findings in a recording, worst first."""

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, overload

import numpy as np
import xarray as xr

from tcnn_probe.diagnosis.finished import FINISHED
from tcnn_probe.diagnosis.signs import SIGNS, HealthLimits, Sign

__all__ = ["Finding", "Findings", "health", "severity", "signs_of"]


@dataclass(frozen=True)
class Finding:
    """A sign of illness in a layer, over consecutive marks.

    Args:
        sign: Name of the sign, such as "entropy collapse".
        is_alarm: Whether it is an alarm rather than a notice.
        layer: Name of the layer.
        heads: Heads that showed the sign; empty for a sign of the layer.
        since: First mark at which the sign was seen.
        until: Last mark at which the sign was seen; None if it was seen at the recording's last
            mark.
        measure: Name of the measured quantity, usually a variable.
        value: Worst value of the measure.
        usual: Usual values of the measure.
        leads_to: Known consequences, causes or remedies.
        source: Papers that describe the sign, and the source of its limit.
    """

    sign: str
    is_alarm: bool
    layer: str
    heads: tuple[int, ...]
    since: int | float
    until: int | float | None
    measure: str
    value: float
    usual: str
    leads_to: str
    source: str

    def __str__(self) -> str:
        heads = f", heads {_join(self.heads)}" if self.heads else ""
        until = "" if self.until is None else f" until {self.until}"
        return (
            f"{self.sign} in {self.layer}{heads}, since {self.since}{until}: {self.measure} "
            f"{self.value:.3g} (usual: {self.usual}); {self.leads_to} ({self.source})"
        )


@dataclass(frozen=True, repr=False)
class Findings(Sequence[Finding]):
    """Findings, worst first, as a sequence that prints as a table.

    Args:
        findings: The findings.
        along: Name of the marks, such as "epoch".
        marks: Number of marks in the recording.
        unseen: Signs that the recording cannot show, with the variables that it lacks.
    """

    findings: tuple[Finding, ...]
    along: str
    marks: int
    unseen: dict[str, list[str]]

    @property
    def alarms(self) -> tuple[Finding, ...]:
        """Findings that are alarms."""
        return tuple(finding for finding in self.findings if finding.is_alarm)

    def __len__(self) -> int:
        return len(self.findings)

    @overload
    def __getitem__(self, index: int) -> Finding: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Finding, ...]: ...

    def __getitem__(self, index: int | slice) -> Finding | tuple[Finding, ...]:
        return self.findings[index]

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the findings as dictionaries, for ``pandas.DataFrame`` or JSON."""
        return [asdict(finding) for finding in self.findings]

    def __repr__(self) -> str:
        rows = self._rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(map(str.ljust, row, widths)).rstrip()
            for row in (rows if len(rows) > 1 else [])
        ]
        for sign, finding in {finding.sign: finding for finding in self}.items():
            lines.append(f"{sign}: {finding.leads_to} ({finding.source})")
        return "\n".join([self._title(), *lines, *self._footer()])

    def _repr_html_(self) -> str:
        head, *rows = [
            "".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in self._rows()
        ]
        body = "".join(
            f'<tr title="{html.escape(finding.leads_to, quote=True)}">{row}</tr>'
            for finding, row in zip(self, rows, strict=True)
        )
        notes = "".join(f"<p>{html.escape(text)}</p>" for text in self._footer())
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        title = f"<p>{html.escape(self._title())}</p>"
        return title + (table if rows else "") + notes

    def _title(self) -> str:
        alarms = len(self.alarms)
        counts = [
            f"{number} {noun}{'s' * (number != 1)}"
            for number, noun in ((alarms, "alarm"), (len(self) - alarms, "notice"))
        ]
        return f"{', '.join(counts)} in {self.marks} {self.along}s"

    def _rows(self) -> list[list[str]]:
        rows = [["", "sign", "layer", "heads", f"since {self.along}", "until"]]
        rows[0] += ["seen", "usual"]
        for finding in self:
            shown = f"{finding.measure} {finding.value:.3g}"
            until = "" if finding.until is None else str(finding.until)
            kind = "ALARM" if finding.is_alarm else "notice"
            row = [kind, finding.sign, finding.layer, _join(finding.heads)]
            rows.append([*row, str(finding.since), until, shown, finding.usual])
        return rows

    def _footer(self) -> list[str]:
        if not self.unseen:
            return []
        lacking = dict.fromkeys(name for names in self.unseen.values() for name in names)
        return [
            f"not looked for: {', '.join(self.unseen)}: the recording has no {', '.join(lacking)}; "
            f"record(..., health=True) keeps them"
        ]


def health(ds: xr.Dataset | xr.DataTree, **limits: float) -> Findings:
    """Look for signs of illness in a recording: what broke, in which heads, since which epoch.

    ::

        with tcnn_probe.record(model, "run.zarr", health=True) as recorder:
            ...
        print(tcnn_probe.health(recorder.dataset))

    Alarms are signs that precede divergence, and dead parts; notices are signs that healthy models
    can have, but that spoil maps or dense features. A sign is reported for each layer with the
    heads that show it, from the first to the last mark of its last spell. Most signs need the probe
    "health", which ``record(..., health=True)`` adds; signs of logits and entropies are found in
    any recording. In a recording that :func:`tcnn_probe.look` has made, the signs are those of a
    finished network, without advice on training. Limits are those of the literature, or are
    relative to the best value that the same head had before, see
    :class:`~tcnn_probe.diagnosis.HealthLimits`.

    Args:
        ds: A recording: ``recorder.dataset``, ``xarray.open_zarr(path)``,
            ``tcnn_probe.open(path)``, or a selection of marks, or of one of several runs.
        **limits: Limits that replace the defaults, such as ``max_logit=200``; see
            :class:`~tcnn_probe.diagnosis.HealthLimits`.

    Returns:
        Findings, as a sequence that prints as a table. Alarms come before notices, then signs that
        last before signs that ended, and then the most serious and the earliest first.

    Raises:
        TypeError: ``ds`` is not a dataset, or a limit is unknown.
        ValueError: The dataset is not a recording, or has no layers.
    """
    selection = "ds.sel(run=...)"
    if isinstance(ds, xr.DataTree) and "heads" in ds.children:
        attrs = ds.attrs | ds["heads"].attrs
        ds = ds["heads"].to_dataset().assign_attrs(attrs)
        selection = "tree.sel(run=...)"
    if not isinstance(ds, xr.Dataset):
        raise TypeError(
            "expected a recording's dataset or tree, from xarray.open_zarr(path) or "
            f"tcnn_probe.open(path), got {type(ds).__name__}"
        )
    checked = HealthLimits(**limits)
    along = ds.attrs.get("along")
    if along not in ds.dims:
        raise ValueError("expected a recording: recorder.dataset, or xarray.open_zarr(path)")
    if "run" in ds.dims:
        runs = ds.run.values.tolist()
        raise ValueError(
            f"expected one recording, got several: choose one with {selection}, of {runs}"
        )
    if "layer" not in ds.dims:
        raise ValueError("the recording has no layers: it was made without probes of attention")
    signs = signs_of(ds.attrs)
    names = {name for sign in signs.values() for name in (sign.variable, *sign.needs)}
    # Recordings without gated layers lack these variables, so no sign needs them, but conditions
    # use them if present.
    names |= {"content_entropy", "uniform_content_entropy"}
    # Variables are read once, because several conditions use the same variable.
    ds = ds[[name for name in ds.data_vars if name in names]].load()
    # Conditions use the name "mark" for any kind of mark. Labels are dropped, because xarray would
    # align them in every operation, and a recorder that watches health looks for all signs at each
    # mark.
    by_mark = ds.drop_vars(list(ds.coords)).rename({along: "mark"})
    marks, layers = ds[along].values.tolist(), ds.layer.values.tolist()
    findings: list[Finding] = []
    unseen = {}
    for sign in signs.values():
        missing = sign.missing(ds)
        if missing:
            unseen[sign.name] = missing
        else:
            findings += _findings_of(sign, by_mark, marks, layers, checked)
    findings.sort(key=severity)
    return Findings(tuple(findings), str(along), ds.sizes[along], unseen)


def signs_of(attrs: Mapping[Any, Any]) -> Mapping[str, Sign]:
    """Return the signs to look for in a recording with these attributes:
    of a training, or of a finished network.
    """
    return FINISHED if attrs.get("finished") else SIGNS


def severity(finding: Finding) -> tuple[bool, bool, int, float]:
    """Return the sort key of a finding: alarms, signs that last,
    the most serious and the earliest come first.
    """
    return (
        not finding.is_alarm,
        finding.until is not None,
        [*SIGNS, *FINISHED].index(finding.sign),
        finding.since,
    )


def _findings_of(
    sign: Sign,
    ds: xr.Dataset,
    marks: Sequence[int | float],
    layers: Sequence[str],
    limits: HealthLimits,
) -> Iterator[Finding]:
    """Yield a finding for each layer that shows a sign, from the last spell of the sign."""
    shown = sign.condition(ds, limits).transpose("mark", "layer", ...)
    has_heads = "head" in shown.dims
    name, measure = sign.measure or (sign.variable, lambda ds: ds[sign.variable])
    # Plain arrays, (mark, layer) or (mark, layer, head): xarray takes a tenth of a millisecond for
    # each operation, and a recorder that watches health asks for all signs of all layers at each
    # mark.
    values = measure(ds).transpose(*shown.dims).values
    is_shown = shown.values
    for row, layer in enumerate(layers):
        in_layer = is_shown[:, row]
        at_marks: Any = in_layer.any(1) if has_heads else in_layer
        if not at_marks.any():
            continue
        last = int(np.flatnonzero(at_marks)[-1])
        # The last spell begins after the last mark without the sign.
        earlier = np.flatnonzero(~at_marks[:last])
        first = int(earlier[-1]) + 1 if earlier.size else 0
        in_spell = in_layer[first : last + 1]
        heads: tuple[int, ...] = ()
        if has_heads:
            heads = tuple(np.flatnonzero(in_spell.any(0)).tolist())
        worst: Callable[[Any], Any] = np.max if sign.worst == "largest" else np.min
        # Only values at which the sign is seen count, not those of healthy heads.
        at_spell = values[first : last + 1, row][in_spell]
        yield Finding(
            sign=sign.name,
            is_alarm=sign.is_alarm,
            layer=str(layer),
            heads=heads,
            since=marks[first],
            until=None if last == len(marks) - 1 else marks[last],
            measure=name,
            value=float(worst(at_spell)),
            usual=sign.usual.format(**asdict(limits)),
            leads_to=sign.leads_to,
            source=sign.source,
        )


def _join(heads: Sequence[int]) -> str:
    return ", ".join(map(str, heads))
