"""Results of a training in the study of health:
when it was warned about, and when its loss rose.
"""

import numpy as np
import pytest

from tests.tcnn_probe.diagnosis.test_findings import healthy, make_ill
from training_health import Training, result


def test_alarms_count_from_the_start_of_the_illness() -> None:
    """Alarms that have ended count as well,
    although ``health`` reports only the last spell of a sign.
    """
    ds = healthy()  # epochs 2, 3, 5, 7, 11
    # Two signs: the logits are large, and they jump.
    make_ill(ds, "large logits", slice(1, 2))
    # No jump, as earlier logits were as large.
    make_ill(ds, "large logits", slice(3, None))
    losses = np.array([1.0, 1.5, 1.0, 1.05, 1.2])
    ds = ds.assign(dict.fromkeys(("val_loss", "train_loss", "top1"), ("epoch", losses)))
    row = result(5, ds)
    assert int(row.alarms) == 3
    assert int(row.early_alarms) == 2
    assert float(row.first_alarm) == 7
    assert row.signs.item() == "large logits"
    assert float(row.first_rise) == 11
    row = result(2, ds)
    assert int(row.alarms) == 3
    assert int(row.early_alarms) == 0
    assert float(row.first_alarm) == 3
    assert float(row.first_rise) == 3
    assert row.signs.item() == "large logits, logits jump"
    # No alarm starts at the last epoch, although some last until then.
    row = result(11, ds)
    assert np.isnan(row.first_alarm)


@pytest.mark.parametrize(
    ("illness", "begin"), [("learning rate", 1), ("rate jumps", 6), ("cut head", 6)]
)
def test_start_of_the_illness(illness: str, begin: int) -> None:
    assert Training("class token", illness, 0).begin(10) == begin
