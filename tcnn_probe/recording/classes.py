"""Of which classes maps are kept, where there is a token for each class."""

import operator
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Classes"]


@dataclass(frozen=True)
class Classes:
    """The classes to which the model's output gives most, or those chosen.

    Args:
        top: how many; 0 for none.
        chosen: their indices, in place of the first so many.
    """

    top: int = 3
    chosen: tuple[int, ...] = ()

    @classmethod
    def asked(cls, classes: int | Collection[int] | None) -> "Classes":
        """As users ask: a number of classes, the indices of some, or None for no maps of classes.

        Raises:
            ValueError: no class, or a negative index.
            TypeError: something else than integers.
        """
        if classes is None:
            return cls(0)
        alone = isinstance(classes, int)
        try:
            given: list[Any] = [classes] if isinstance(classes, int) else list(classes)
            if any(isinstance(index, bool) for index in given):
                raise TypeError("a truth value is no integer")
            indices = [operator.index(index) for index in given]
        except TypeError as error:
            raise TypeError(f"expected a number of classes, or the indices of some, got {classes!r}") from error
        if alone and indices[0] < 1:
            raise ValueError(f"expected classes of 1 or more, or None for no maps of classes; got {classes!r}")
        if not indices or min(indices) < 0:
            raise ValueError(f"expected the indices of classes, from 0, for classes; got {classes!r}")
        indices = sorted(indices) if isinstance(classes, Set) else indices  # which have no order of their own
        return cls(indices[0]) if alone else cls(0, tuple(dict.fromkeys(indices)))

    @property
    def plain(self) -> int | list[int] | None:
        """As users ask, and as it is kept in a recording."""
        return list(self.chosen) or self.top or None

    def check(self, counts: Mapping[str, int]) -> None:
        """Whether the classes chosen are among those there are.

        Args:
            counts: how many each pool or layer has, by name.

        Raises:
            ValueError: they are not.
        """
        for name, count in counts.items():
            if self.chosen and max(self.chosen) >= count:
                raise ValueError(f"expected indices of classes below {count}, for {name!r}, got {max(self.chosen)}")

    def of(
        self, maps: Mapping[str, Tensor], output: Any, rows: Sequence[int], images: int
    ) -> tuple[Mapping[str, Tensor], str]:
        """The maps without those of other classes, and with the index and the score of each class that stays.

        Args:
            maps: ``attention_by_class`` among them has the maps of all K classes, shape (n, K, height, width).
            output: of the model; None if it was not called as a whole.
            rows: which of the images of the forward these n are.
            images: of the forward.

        Returns:
            the maps: of k classes, with ``class_index`` and ``class_score``, shape (n, k); and why there are none of
            classes, if so.
        """
        name = "attention_by_class"
        others = {each: value for each, value in maps.items() if each != name}
        if name not in maps or not (self.top or self.chosen):
            return others, ""
        every = maps[name]
        wanted = (images, every.shape[1])
        scores = None
        if isinstance(output, Tensor) and tuple(output.shape) == wanted:
            scores = output.detach()[list(rows)].to(every)
        if self.chosen:
            index = torch.tensor(self.chosen, device=every.device).expand(len(every), -1)
        elif scores is None:
            known = "the model was not called as a whole" if output is None else f"its output is none of shape {wanted}"
            return others, f"{known}, so its best classes are unknown: classes=[...] keeps maps of those you name"
        else:
            index = scores.topk(min(self.top, scores.shape[1])).indices
        score = torch.full(index.shape, torch.nan).to(every) if scores is None else scores.gather(1, index)
        chosen = every[torch.arange(len(every), device=every.device)[:, None], index]
        return {**others, name: chosen, "class_index": index, "class_score": score}, ""
