"""Outputs of a processor of transformers,
all of which reach the model: texts, masks and ids besides the images.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tcnn_probe
from tests.extras import need

transformers = need("transformers")

SIZES = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 17,
}
IMAGE = {"image_size": 24, "patch_size": 8}
# There are more texts than images, so a batch divided along the wrong one has another shape.
TEXTS, WORDS = 5, 7
FLOAT32 = 1.2e-7
"""Its eps: transformers computes softmaxes in float32, whatever the model is in."""
GRID = "3x3x3"


class WithTexts(nn.Module):
    """The model as a function of images alone."""

    def __init__(self, model: nn.Module, **inputs: Tensor) -> None:
        super().__init__()
        self.model = model
        self.inputs = inputs

    def forward(self, images: Tensor) -> Tensor:
        return self.model(pixel_values=images, **self.inputs).logits_per_image


@pytest.fixture(scope="module")
def clip() -> nn.Module:
    torch.manual_seed(3)
    # If eos_token_id is 2, the last word is the position of the largest id.
    text = SIZES | {"vocab_size": 19, "max_position_embeddings": 11, "eos_token_id": 2}
    config = transformers.CLIPConfig(
        text_config=text, vision_config=SIZES | IMAGE, projection_dim=13
    )
    return transformers.CLIPModel(config).double().eval()


@pytest.fixture
def inputs() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    # Ids start at 3, to avoid eos_token_id=2.
    words = torch.randint(3, 19, (TEXTS, WORDS), generator=generator)
    mask = torch.ones(TEXTS, WORDS, dtype=torch.long)
    # One text is shorter, so a lost mask changes its logits.
    mask[1, 4:] = 0
    images = torch.randn(2, 3, 24, 24, generator=generator, dtype=torch.float64)
    return {"input_ids": words, "attention_mask": mask, "pixel_values": images}


def without_images(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if name != "pixel_values"}


@pytest.mark.study
@pytest.mark.parametrize(
    "method", ["input_x_gradient", "gradcam", "integrated_gradients", "occlusion"]
)
@pytest.mark.filterwarnings("ignore:Setting forward, backward hooks")
def test_saliency_for_a_text(clip: nn.Module, inputs: dict[str, Any], method: str) -> None:
    options: dict[str, Any] = {}
    if method == "gradcam":
        options["layer"] = "vision_model.encoder.layers.1.layer_norm1"
    # Texts must be assigned to the right images although a batch holds fewer than all.
    maps = tcnn_probe.saliency(clip, inputs, 3, method, batch_size=1, **options)
    bound = WithTexts(clip, **without_images(inputs))
    options = {name: f"model.{value}" for name, value in options.items()}
    images = inputs["pixel_values"]
    expected = tcnn_probe.saliency(bound, images, 3, method, **options)
    np.testing.assert_allclose(maps.values, expected.values, rtol=1e-12, atol=0)
    # Maps of zeros would agree too.
    assert maps.values.std() > 0
    assert not clip._forward_pre_hooks


def test_faithfulness_for_texts(clip: nn.Module, inputs: dict[str, Any]) -> None:
    options = {"steps": 2, "metrics": ["deletion_auc", "insertion_auc"]}
    scores = tcnn_probe.faithfulness(clip, inputs, "input_x_gradient", **options)
    bound = WithTexts(clip, **without_images(inputs))
    images = inputs["pixel_values"]
    expected = tcnn_probe.faithfulness(bound, images, "input_x_gradient", **options)
    assert scores.target.values.tolist() == expected.target.values.tolist()
    for name in expected.data_vars:
        np.testing.assert_allclose(scores[name], expected[name], rtol=1e-9)


# 10 is the number of 3 x 3 patches and a class token.
@pytest.mark.parametrize("words", [WORDS, 10])
@pytest.mark.filterwarnings("ignore:no attention maps for 2 layers")
def test_maps_of_an_image_and_texts(clip: nn.Module, inputs: dict[str, Any], words: int) -> None:
    inputs["input_ids"] = torch.randint(3, 19, (TEXTS, words))
    inputs["attention_mask"] = torch.ones(TEXTS, words, dtype=torch.long)
    maps = tcnn_probe.attention_maps(clip, inputs)
    # Only the eager implementation returns its attention.
    clip.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = clip.vision_model(inputs["pixel_values"], output_attentions=True).attentions
    clip.set_attn_implementation("sdpa")
    assert set(maps.children) == {GRID}
    assert all(layer.startswith("vision") for layer in maps[GRID].layer.values)
    expected = torch.stack(attentions, 1)[:, :, :, 1:, 1:]
    np.testing.assert_allclose(
        maps[GRID].attention.values.reshape(expected.shape), expected, atol=FLOAT32
    )


def test_ids_of_a_prompt_and_its_image() -> None:
    torch.manual_seed(3)
    vision = transformers.CLIPVisionConfig(**SIZES, **IMAGE)
    text = transformers.LlamaConfig(
        **SIZES, vocab_size=31, max_position_embeddings=41, pad_token_id=0
    )
    config = transformers.LlavaConfig(
        # Each of the 3 x 3 patches is a token of this id in the prompts.
        vision_config=vision,
        text_config=text,
        image_token_index=30,
    )
    llava = transformers.LlavaForConditionalGeneration(config).eval()
    # The second prompt has another word, so ids have a row for each image.
    ids = torch.tensor([[5, *[30] * 9, 6, 7], [5, *[30] * 9, 8, 7]])
    images = torch.randn(2, 3, 24, 24)
    inputs = {"input_ids": ids, "pixel_values": images, "attention_mask": ids.sign()}
    maps = tcnn_probe.attention_maps(
        llava, inputs, layers="*vision*", queries="class", batch_size=1
    )
    alone = tcnn_probe.attention_maps(llava.model.vision_tower, images, queries="class")
    # The language model uses the features before the last layer, which is computed anyway.
    np.testing.assert_allclose(maps[GRID].class_attention, alone[GRID].class_attention, atol=1e-6)


def test_patches_of_images_of_different_sizes_are_refused(clip: nn.Module) -> None:
    inputs = {
        "pixel_values": torch.randn(2, 9, 192),
        "pixel_attention_mask": torch.ones(2, 9),
        "spatial_shapes": torch.tensor([[3, 3], [2, 4]]),
    }
    with pytest.raises(ValueError, match=r"\(2, 9, 192\), patches of images of several"):
        tcnn_probe.attention_maps(clip, inputs)
    # Of Qwen2-VL, the patches of all images behind each other.
    inputs = {"pixel_values": torch.randn(17, 192), "image_grid_thw": torch.ones(1, 3)}
    with pytest.raises(ValueError, match=r"\(17, 192\), patches of images of several"):
        tcnn_probe.attention_maps(clip, inputs)
