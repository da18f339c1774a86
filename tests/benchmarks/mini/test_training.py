"""A killed training run must come back onto the very same path, and the model must start able to copy."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from ragkv.benchmarks.mini.recipe import MiniTrainConfig, Stage
from ragkv.benchmarks.mini.training import build_model, train_mini

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class KilledError(Exception):
    """Stands for kill -9 in the middle of a run."""


def test_resumes_bit_for_bit(tokenizer: PreTrainedTokenizerFast, tiny: MiniTrainConfig, tmp_path: Path) -> None:
    seen: list[tuple[float, float]] = []

    def record(progress: Mapping[str, float | int | str]) -> None:
        seen.append((float(progress["loss"]), float(progress["lr"])))

    whole = train_mini(tiny, tokenizer, tmp_path / "whole", on_progress=record)
    straight = list(seen)
    seen.clear()

    def die(progress: Mapping[str, float | int | str]) -> None:
        record(progress)
        if progress["number"] == 1:
            raise KilledError

    with pytest.raises(KilledError):
        train_mini(tiny, tokenizer, tmp_path / "cut", on_progress=die)
    resumed = train_mini(tiny, tokenizer, tmp_path / "cut", on_progress=record)
    assert seen == straight
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert not list(tmp_path.rglob("*.tmp"))


def test_processes_that_share_the_rows_take_the_same_steps(
    tokenizer: PreTrainedTokenizerFast, tiny: MiniTrainConfig, tmp_path: Path
) -> None:
    tiny = replace(tiny, autocast=False)
    start, threads = build_model(tiny, tokenizer).state_dict(), torch.get_num_threads()
    alone = train_mini(tiny, tokenizer, tmp_path / "alone").state_dict()
    shared = train_mini(replace(tiny, processes=2), tokenizer, tmp_path / "shared").state_dict()
    assert torch.get_num_threads() == threads
    for name, value in alone.items():
        apart, moved = (shared[name] - value).abs().mean(), (start[name] - value).abs().mean()
        assert apart < 0.02 * moved, name  # AdamW makes whole steps of gradients that are but rounding


def test_without_resume_starts_over(tokenizer: PreTrainedTokenizerFast, tiny: MiniTrainConfig, tmp_path: Path) -> None:
    steps: list[object] = []
    for resume in (True, False, True):
        train_mini(tiny, tokenizer, tmp_path, resume=resume, on_progress=lambda p: steps.append(p["number"]))
    assert steps == [0, 1, 2, 0, 1, 2]


def test_checkpoint_of_another_shape_is_refused(
    tokenizer: PreTrainedTokenizerFast, tiny: MiniTrainConfig, tmp_path: Path
) -> None:
    train_mini(tiny, tokenizer, tmp_path)
    with pytest.raises(ValueError, match="resume=False"):
        train_mini(replace(tiny, hidden=32), tokenizer, tmp_path)


def test_training_changes_every_weight(
    tokenizer: PreTrainedTokenizerFast, tiny: MiniTrainConfig, tmp_path: Path
) -> None:
    before = build_model(tiny, tokenizer).state_dict()
    after = train_mini(tiny, tokenizer, tmp_path).state_dict()
    assert [name for name in before if torch.equal(before[name], after[name])] == []


def test_a_fresh_model_has_induction_heads(tokenizer: PreTrainedTokenizerFast) -> None:
    """Layer 1 attends to the token after the earlier occurrence, many times more than evenly spread attention."""
    model = build_model(MiniTrainConfig(), tokenizer).eval()
    model.set_attn_implementation("eager")
    once = torch.randperm(len(tokenizer) - 6, generator=torch.Generator().manual_seed(0))[:64] + 6
    with torch.inference_mode():
        attention = model(torch.cat([once, once])[None], output_attentions=True).attentions[1][0]
    hits = attention.diagonal(offset=-63, dim1=1, dim2=2)[:, 2:]  # query i + 63 on key i: one after its twin
    assert float(hits.mean()) > 0.1


def test_a_grown_model_begins_as_exact_as_the_small_one(
    tokenizer: PreTrainedTokenizerFast, tiny: MiniTrainConfig, tmp_path: Path
) -> None:
    small = build_model(tiny, tokenizer).eval()
    small.save_pretrained(tmp_path / "small")
    grown = build_model(replace(tiny, layers=tiny.layers + 3, start=str(tmp_path / "small"), seed=9), tokenizer).eval()
    ids = torch.arange(8, 40)[None]
    with torch.inference_mode():
        torch.testing.assert_close(grown(ids).logits, small(ids).logits, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="more than"):
        build_model(replace(tiny, layers=tiny.layers - 1, start=str(tmp_path / "small")), tokenizer)


@pytest.mark.parametrize("change", [{"steps": -1}, {"batch": 0}, {"passages": (3, 2)}, {"block_share": 1.5}])
def test_a_senseless_stage_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="stage 'x'"):
        Stage(**({"name": "x", "kind": "qa", "steps": 1, "batch": 1} | change))  # type: ignore[arg-type]


def test_a_senseless_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple"):
        MiniTrainConfig(hidden=100, q_heads=6)


def test_processes_share_a_cpu_only() -> None:
    with pytest.raises(ValueError, match="processes"):
        MiniTrainConfig(processes=2, device="cuda")


def test_a_spread_stage_sees_every_size_at_one_cost() -> None:
    stage = Stage(name="wide", kind="mixed", steps=1, batch=3, passages=(0, 34), spread=True)
    rng = random.Random(0)
    drawn = Counter(stage.draw(rng) for _ in range(4000))
    counts: Counter[int] = Counter()
    for (passages, rows), times in drawn.items():
        counts[passages] += times
        assert rows * (passages + 7) == pytest.approx(3 * 41, rel=0.25)
    assert set(counts) == set(range(35))
    assert sum(counts[n] for n in range(2, 9)) == pytest.approx(sum(counts[n] for n in range(9, 35)), rel=0.25)
