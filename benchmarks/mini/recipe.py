"""The shape of the mini model, and the stages of its training."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ragkv.errors import UsageError

__all__ = ["DEFAULT_STAGES", "FULL_STAGES", "MiniTrainConfig", "Stage", "chosen_config", "chosen_stages"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of the curriculum. `passages` is the inclusive range of passages (or of records to copy) per row."""

    name: str
    kind: Literal["copy", "qa", "mixed"]
    steps: int
    batch: int
    passages: tuple[int, int] = (1, 1)
    questions: int = 16
    block_share: float = 0.0
    misses: float = 0.0
    """The least share of questions that the context does not answer (`sample.qa_sample`)."""
    hard: float = 0.0
    """The share of rows whose passages are drawn from a large world, as a retriever would."""
    prose: float = 0.0
    """The share of "mixed" rows that ask for words left out of English prose (`mixture.prose_sample`)."""
    shots: float = 0.0
    """The share of "mixed" rows that ask for the labels of many-shot learning (`labelled.shot_sample`)."""
    spread: bool = False
    """Draw the number of passages log-uniformly. `batch` rows have the most passages; of shorter rows there are as
    many as cost the same."""
    lr: float = 1e-3
    final_lr: float | None = None
    """The learning rate at the stage's last step, reached linearly; None keeps `lr`."""

    def __post_init__(self) -> None:
        least = 0 if self.kind == "mixed" else 1
        if self.steps < 0 or self.batch < 1 or not least <= self.passages[0] <= self.passages[1]:
            raise ValueError(f"stage {self.name!r}: steps >= 0, batch >= 1 and {least} <= passages[0] <= passages[1]")
        shares = (self.block_share, self.misses, self.hard, self.prose, self.shots, self.prose + self.shots)
        if not all(0.0 <= share <= 1.0 for share in shares):
            raise ValueError(
                f"stage {self.name!r}: block_share, misses, hard, prose and shots are shares, the last two of the same"
            )

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """The passages per row of a step, and its number of rows. Two questions cost about as much as a passage."""
        least, most = self.passages
        if not self.spread:
            return rng.randint(least, most), self.batch
        passages = round(math.exp(rng.uniform(math.log(max(least, 0.4)), math.log(most + 0.49))))
        asked = self.questions / 2
        return passages, round(self.batch * (most + asked) / (passages + asked))


_MIXED = Stage(
    name="mixed",
    kind="mixed",
    steps=640,
    batch=8,
    passages=(0, 10),
    questions=14,
    block_share=0.45,
    hard=0.7,
    prose=0.18,
    lr=1.2e-3,
    final_lr=2e-5,
)
_WIDE = replace(
    _MIXED, name="wide", steps=800, batch=3, passages=(0, 34), spread=True, prose=0.15, lr=8e-4, final_lr=1e-5
)
DEFAULT_STAGES = (
    Stage(name="copy", kind="copy", steps=120, batch=16, passages=(3, 20), lr=2e-3),
    Stage(name="few", kind="qa", steps=60, batch=16, passages=(1, 3), questions=8, lr=1.5e-3),
    Stage(name="many", kind="qa", steps=600, batch=8, passages=(1, 9), block_share=0.4, lr=1.5e-3, final_lr=5e-4),
    _MIXED,
    replace(_MIXED, name="again", steps=190, passages=(1, 10), questions=16, lr=7e-4, final_lr=4e-4),
    replace(_MIXED, name="long", steps=62, batch=6, passages=(3, 24), prose=0.15, lr=4e-4, final_lr=1e-5),
    _WIDE,
    replace(_WIDE, name="near", steps=1000, batch=4, questions=18, block_share=0.5, hard=0.8, prose=0.13, shots=0.18),
)
FULL_STAGES = (
    *(replace(stage, block_share=0.0) for stage in DEFAULT_STAGES[:2]),
    replace(DEFAULT_STAGES[2], steps=450, block_share=0.0, final_lr=3e-4),
    Stage(
        name="hard",
        kind="qa",
        steps=130,
        batch=8,
        passages=(1, 11),
        misses=0.1,
        hard=0.7,
        lr=5e-4,
        final_lr=2e-5,
    ),
)
"""Full attention only, one and two hops: the model on which block fine-tuning is shown (Block-Attention Table 1)."""
_FULL_LAYERS = 4
"""Layers that are enough for `FULL_STAGES`."""


def chosen_stages(*, goes_on: bool, full_only: bool, scale: float = 1.0) -> tuple[Stage, ...]:
    """The stages of a training. `scale` multiplies the steps.

    With `goes_on`, training starts from a model that can already copy and read, so only the stages with all kinds of
    question remain. With `full_only`, no row is in the block layout.
    """
    stages = FULL_STAGES if full_only and not goes_on else DEFAULT_STAGES
    return tuple(
        replace(
            stage,
            steps=max(1, round(stage.steps * scale)),
            block_share=0.0 if full_only else stage.block_share,
        )
        for stage in stages
        if stage.kind == "mixed" or not goes_on
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniTrainConfig:
    """The shape of the model and the settings of its training. Every field is written to `ragkv.json`."""

    hidden: int = 192
    layers: int = 6
    q_heads: int = 6
    kv_heads: int = 3
    intermediate: int = 512
    rope_theta: float = 1_000_000.0
    max_positions: int = 8192
    stages: tuple[Stage, ...] = DEFAULT_STAGES
    weight_decay: float = 0.01
    warmup: int = 20
    clip: float = 1.0
    seed: int = 0
    checkpoint_every: int = 50
    device: str = "cpu"
    autocast: bool = True
    processes: int = 1
    """Processes that share the rows of each step (`peers`), on a CPU only."""
    start: str | None = None
    """Folder of a model to start from instead of random weights. Layers that it lacks start as identities."""

    def __post_init__(self) -> None:
        if self.hidden % self.q_heads or self.q_heads % self.kv_heads:
            raise ValueError("hidden must be a multiple of q_heads, and q_heads of kv_heads")
        if not self.stages or self.checkpoint_every < 1:
            raise ValueError("give at least one stage and checkpoint_every >= 1")
        if self.processes < 1 or (self.processes > 1 and self.device != "cpu"):
            raise ValueError("processes must be at least 1, and 1 unless the device is cpu")

    def shape(self) -> dict[str, Any]:
        """The fields of config.json of a Llama of this shape, without the number of layers."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.q_heads,
            "num_key_value_heads": self.kv_heads,
        }


def chosen_config(
    config: MiniTrainConfig, *, start: Path | None, full_only: bool, scale: float = 1.0
) -> MiniTrainConfig:
    """`config` with the stages and layers for a training that starts from the weights in `start`, or from random ones.

    A model grows at least to the layers of `config`; with `full_only` it keeps its own. Raises UsageError if the folder
    `start` holds no model of this shape.
    """
    stages = chosen_stages(goes_on=start is not None, full_only=full_only, scale=scale)
    if start is None:
        return replace(config, stages=stages, layers=_FULL_LAYERS if full_only else config.layers)
    try:
        told = json.loads((start / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{start} holds no config.json that can be read; give the folder of a mini model.") from error
    wanted = {"model_type": "llama", **config.shape()}
    own = told.get("num_hidden_layers") if isinstance(told, dict) else None
    if not isinstance(own, int) or any(told.get(name) != value for name, value in wanted.items()):
        raise UsageError(f"{start} is no mini model: its config.json must have {wanted} and num_hidden_layers.")
    return replace(config, stages=stages, start=str(start), layers=own if full_only else max(own, config.layers))
