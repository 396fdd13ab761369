"""Sparsity of layers between patches, counted weight by weight."""

from pathlib import Path

import pytest
import torch
from timm.models.mlp_mixer import Affine, MixerBlock, MlpMixer, ResBlock
from torch import nn

import tcnn_probe


def mlp_model(block: type[nn.Module]) -> nn.Module:
    """Return two blocks on 2 x 3 patches of 7 channels, with weights of very different sizes."""
    torch.manual_seed(0)
    about = {"mlp_ratio": 3, "norm_layer": Affine} if block is ResBlock else {}
    model = MlpMixer(
        5, img_size=(32, 48), num_blocks=2, embed_dim=7, block_layer=block, **about
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Of fifth powers, many are small beside the largest, and none is near the limit.
            parameter.copy_(torch.randn_like(parameter) ** 5)
    return model


def share_of_small(*layers: nn.Linear) -> float:
    small, count = 0, 0
    for layer in layers:
        weights = [abs(w) for row in layer.weight.detach().double().tolist() for w in row]
        small += sum(w < 0.05 * max(weights) for w in weights)
        count += len(weights)
    return small / count


@pytest.mark.parametrize("block", [ResBlock, MixerBlock])
def test_share_of_small_weights(block: type[nn.Module], tmp_path: Path) -> None:
    model = mlp_model(block)
    for epoch in range(2):
        with tcnn_probe.record(model, tmp_path / "run.zarr", probes="cross-patch") as recorder:
            recorder.mark(epoch=epoch)  # no forward is needed
        for layer in ("blocks.0", "blocks.1"):
            block_module = model.get_submodule(layer)
            ds = recorder.tree["cross-patch"].to_dataset().sel(layer=layer, epoch=epoch)
            between = (
                [block_module.linear_tokens]
                if block is ResBlock
                else [block_module.mlp_tokens.fc1, block_module.mlp_tokens.fc2]
            )
            expected = {
                "cross_patch_sparsity": between,
                "fc1_sparsity": [block_module.mlp_channels.fc1],
            }
            expected["fc2_sparsity"] = [block_module.mlp_channels.fc2]
            assert set(ds.data_vars) == set(expected)
            for name, layers in expected.items():
                # Some weights are small and others are not, so that another threshold would show.
                assert 0.1 < float(ds[name]) < 1
                assert float(ds[name]) == pytest.approx(share_of_small(*layers), rel=1e-12)
        with torch.no_grad():
            # One large weight makes all others small, only in the next epoch.
            model.blocks[1].mlp_channels.fc2.weight[0, 0] = 1e6


def test_threshold_is_not_rounded_to_half_precision() -> None:
    """5 % of 1.0078125 is 0.0504, which bfloat16 would round to 0.0503,
    the value of the weights below.
    """
    model = mlp_model(ResBlock).to(torch.bfloat16)
    with torch.no_grad():
        model.blocks[0].linear_tokens.weight.fill_(0.05029296875)[0, 0] = 1.0078125
    with tcnn_probe.record(model, probes="cross-patch", layers="blocks.0") as recorder:
        recorder.mark(epoch=0)
    # All 6 x 6 weights but the large one are small.
    assert recorder.tree["cross-patch"].to_dataset().cross_patch_sparsity.item() == pytest.approx(
        35 / 36
    )
