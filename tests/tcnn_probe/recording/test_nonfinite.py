"""Images that give NaN or infinities are left out,
counted and warned about; the next epoch is clean.
"""

import warnings

import numpy as np
import pytest
import timm
import torch
from torch import Tensor

import tcnn_probe
from tests.tcnn_probe.networks import Branches
from tests.tcnn_probe.oracle import gpsa_statistics, over_images


def images(*broken: float) -> Tensor:
    """Return five images, the first of which contain the given values."""
    x = torch.randn(5, 2, 5, 7, generator=torch.Generator().manual_seed(0))
    for image, value in enumerate(broken):
        if value:
            x[image] = value
    return x


@pytest.mark.parametrize(
    # An infinity becomes NaN in the softmax; bfloat16 is widened before it is summed.
    ("value", "dtype"),
    [(np.nan, torch.float32), (-np.inf, torch.bfloat16)],
    ids=str,
)
def test_nonfinite_images_are_left_out_counted_and_warned_about(
    value: float, dtype: torch.dtype
) -> None:
    model = Branches().to(dtype)
    fine = images().to(dtype)
    with tcnn_probe.record(model) as recorder:
        # Images 0 and 2 of the first five are not finite, and image 1 of the second five.
        model(near=fine, far=images(value, 0.0, value).to(dtype))
        model(near=fine, far=images(0.0, value, 0.0).to(dtype))
        with pytest.warns(RuntimeWarning, match=r"left out of the means.*\{'far': 3\}") as caught:
            recorder.mark(epoch=0, top1=0.5)
        clean = images(0.0, 0.0, 0.0).to(dtype)
        for rows in ([1, 3, 4], [0, 2, 3, 4]):
            model(near=fine[rows], far=clean[rows])
        recorder.mark(epoch=1)
    assert [warning.filename for warning in caught] == [__file__]
    ds = recorder.dataset
    assert ds.nonfinite_images.values.tolist() == [[0, 3], [0, 0]]
    assert ds.images.values.tolist() == [[10, 10], [7, 7]]
    assert ds.top1[0] == 0.5
    far = ds.sel(layer="far").drop_vars(["images", "nonfinite_images", "top1"])
    for name, values in far.data_vars.items():
        assert np.isfinite(values).all(), name
        if name.endswith("_halves"):  # the half of an image depends on those before it
            continue
        np.testing.assert_allclose(values[0], values[1], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.study(but=["True"])
@pytest.mark.parametrize("fused", [True, False])
def test_every_variable_is_that_of_the_other_images(fused: bool) -> None:
    """Windows, class tokens, patterns, health, segments and mean attention, also over ranks."""
    torch.manual_seed(0)
    vit = timm.models.VisionTransformer((12, 20), 4, 3, 0, "", 21, 2, 3).eval()
    vit.patch_embed.strict_img_size = False
    swin = timm.models.SwinTransformer(
        (24, 40), 4, 3, 0, embed_dim=14, depths=(2,), num_heads=(2,), window_size=(3, 5)
    ).eval()
    x = torch.randn(5, 3, 24, 40)
    broken = x.clone()
    broken[1] = torch.nan
    for model in (vit, swin):
        for module in model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = fused
        model = model.double()
        size = (12, 20) if model is vit else (24, 40)
        trees = {}
        for name, batches in {"others": [x[[0]], x[2:]], "all": [broken[:2], broken[2:]]}.items():
            probes = [*tcnn_probe.DEFAULT, "health", "segments", "mean-attention"]
            with (
                warnings.catch_warnings(),
                tcnn_probe.record(model, probes=probes) as recorder,
                torch.no_grad(),
            ):
                warnings.simplefilter("ignore")
                for batch in batches:
                    model(batch[..., : size[0], : size[1]].double())
                recorder.mark(epoch=0)
            trees[name] = recorder.tree
            recorded = recorder.dataset
        for group in trees["others"].groups:
            expected = trees["others"][group].dataset
            got = trees["all"][group].dataset
            for name in expected.data_vars.keys() - {"images", "nonfinite_images"}:
                if name.endswith("_halves"):  # of other images, as one is left out
                    continue
                np.testing.assert_allclose(
                    got[name], expected[name], rtol=1e-9, atol=1e-12, err_msg=name
                )
        assert (recorded.nonfinite_images == 1).all()
        assert (recorded.images == 5).all()


def test_next_epoch_is_clean_even_if_warnings_are_errors() -> None:
    model = Branches()
    fine = images()
    with tcnn_probe.record(model) as recorder:
        model(near=fine, far=images(np.nan))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(RuntimeWarning, match="far"):
                recorder.mark(epoch=0)
        # The warning comes after the mark is made, so raising it loses no mark.
        assert recorder.epochs == (0,)
        model(near=fine, far=fine)
        recorder.mark(epoch=1)
    last = recorder.dataset.sel(epoch=1, layer="far")
    assert last.nonfinite_images == 0
    assert last.images == len(fine)
    for name, expected in gpsa_statistics(model.far, fine).items():
        expected = over_images(name, expected)
        np.testing.assert_allclose(last[name], expected, rtol=1e-5, atol=1e-5)
