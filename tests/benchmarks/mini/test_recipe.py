"""Which stages a training takes."""

from __future__ import annotations

from ragkv.benchmarks.mini.recipe import DEFAULT_STAGES, FULL_STAGES, chosen_stages


def test_from_nothing_the_whole_curriculum_is_taken() -> None:
    assert chosen_stages(goes_on=False, full_only=False) == DEFAULT_STAGES
    assert chosen_stages(goes_on=False, full_only=True) == FULL_STAGES


def test_a_model_that_reads_goes_on_with_all_kinds_of_question() -> None:
    names = [stage.name for stage in chosen_stages(goes_on=True, full_only=False)]
    assert names == [stage.name for stage in DEFAULT_STAGES if stage.kind == "mixed"]


def test_full_only_has_no_row_in_the_block_layout() -> None:
    stages = chosen_stages(goes_on=True, full_only=True)
    assert {stage.block_share for stage in stages} == {0.0}
    assert max(stage.passages[1] for stage in stages) == max(stage.passages[1] for stage in DEFAULT_STAGES)


def test_scale_multiplies_steps_and_leaves_one_at_least() -> None:
    scaled = chosen_stages(goes_on=True, full_only=False, scale=0.1)
    assert {stage.name: stage.steps for stage in scaled}["near"] == 100
    assert {stage.steps for stage in chosen_stages(goes_on=False, full_only=False, scale=1e-6)} == {1}
