"""Tests that timm 1.0.20, the oldest supported version, cannot pass for reasons of its own."""

import pytest
import timm
from packaging.version import Version

NOT_THERE = "timm has no such class yet"
IN_FLOAT32 = "timm's ConViT computes positions in float32, and does not run in float64"
SQUARES = "timm's model takes windows of square images only"
DECAYED = "timm does not spare register tokens and Swin V2's temperatures from weight decay"

REASONS = {
    "test_kernels_positions_and_temperatures_do_not_decay[registers and norms]": DECAYED,
    "test_kernels_positions_and_temperatures_do_not_decay[swin v2]": DECAYED,
    "test_recorded_classes_exist[timm.layers.attention_pool.": NOT_THERE,
    "test_recorded_classes_exist[timm.layers.diff_attention.": NOT_THERE,
    "test_recorded_classes_exist[timm.models.csatv2.": NOT_THERE,
    "test_recorded_classes_exist[timm.models.efficientvim.": NOT_THERE,
    "test_recorded_classes_exist[timm.models.vision_transformer.Diff": NOT_THERE,
    "test_unsupported_layers_have_reasons[efficientvim_m1]": NOT_THERE,
    "test_unsupported_layers_have_reasons[csatv2]": NOT_THERE,
    "test_unsupported_layers_have_reasons[vit_dwee_patch16_reg1_gap_256]": NOT_THERE,
    "test_unsupported_layers_have_reasons[vit_dpwee_patch16_reg1_gap_256]": NOT_THERE,
    "test_differential_attention_is_listed_fused_or_not": NOT_THERE,
    "test_recipe_trains_a_small_model_of_its_family[deit_distilled]": "timm has no tasks yet",
    "test_gated_attention_is_shown_whole_and_once[convit]": IN_FLOAT32,
    "test_the_last_that_names_a_head_edits_it[convit": IN_FLOAT32,
    "test_edits_in_a_callback_equal_ablations[convit]": IN_FLOAT32,
    "test_edits_combine_with_ablations_and_recorders[convit]": IN_FLOAT32,
    "test_gated_layers_by_their_content_part[convit]": IN_FLOAT32,
    "test_windows_are_put_in_their_places[swinv2-shifted]": SQUARES,
    **{
        f"{name}[{family}": reason
        for name in (
            "test_convolved_heads_equal_dense_attention",
            "test_kernels_positions_and_temperatures_do_not_decay",
            "test_whole_kernels_cost_what_the_ablation_costs",
            "test_heads_beside_convolutions_are_recorded_as_before",
        )
        for family, reason in {
            "convit": IN_FLOAT32,
            "grouped queries": NOT_THERE,
            "positions by head": "timm's learnt rotary positions do not run in float64",
        }.items()
    },
    "test_pyramids.py::test_equals_brute_force[attention_pool2d]": SQUARES,
    "test_pyramids.py::test_equals_brute_force[levit]": "LeViT's layers do not tell their grids, "
    "which is warned of",
    "test_windows.py::test_equals_brute_force[gcvit]": "GCViT's global queries depend on what else "
    "is in the batch",
    "test_layouts_that_are_not_known_are_left_out_and_named[nest_tiny_jx]": "Nest cannot be built "
    "without memory",
}
"""Parts of the names of tests, and why they are skipped."""


def skip_what_cannot_pass(items: list[pytest.Item]) -> None:
    """Mark tests that are written for a newer timm than the installed one."""
    if Version(timm.__version__) >= Version("1.0.31"):
        return
    for item in items:
        for part, reason in REASONS.items():
            if part in item.nodeid:
                item.add_marker(pytest.mark.skip(f"timm {timm.__version__}: {reason}"))
