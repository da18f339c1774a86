"""The training loop of the mini embedder and reranker: AdamW with a one-cycle schedule, checkpoints, resuming.

A step's data depend only on its number, so a killed run continues from its last checkpoint with the same data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ragkv.finetune.encoder import EncoderShape

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Progress", "TrainConfig", "run_training", "save_checkpoint"]

Progress: TypeAlias = Callable[[Mapping[str, float | int | str]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The shape of the model and the settings of its training. Every field is written to `ragkv.json`."""

    shape: EncoderShape = field(default_factory=EncoderShape)
    steps: int = 1000
    lr: float = 1e-3
    weight_decay: float = 0.01
    warmup: float = 0.05
    clip: float = 1.0
    seed: int = 0
    checkpoint_every: int = 100
    device: str = "cpu"
    autocast: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1 or self.checkpoint_every < 1:
            raise ValueError("steps and checkpoint_every must be at least 1")


def run_training(
    config: TrainConfig,
    modules: Mapping[str, nn.Module],
    step: Callable[[int], tuple[torch.Tensor, Mapping[str, float]]],
    output: Path,
    *,
    resume: bool,
    on_progress: Progress | None,
) -> None:
    """Train `modules` in place. `step(number)` returns the loss and further figures.

    Writes `output/checkpoint.pt` on the way. With `resume`, an existing checkpoint is continued, or refused with
    ValueError if it has another shape or number of steps. After every step, `on_progress` receives step, steps, loss,
    the figures of `step`, lr and seconds.
    """
    import torch

    for module in modules.values():
        module.to(config.device)
    parameters = [parameter for module in modules.values() for parameter in module.parameters()]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, weight_decay=config.weight_decay, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=config.lr, total_steps=config.steps + 1, pct_start=config.warmup, final_div_factor=100
    )
    parts: dict[str, Any] = {**modules, "optimizer": optimizer, "schedule": schedule}
    path, first, spent = output / "checkpoint.pt", 0, 0.0
    output.mkdir(parents=True, exist_ok=True)
    if resume and path.exists():
        saved = torch.load(path, map_location=config.device, weights_only=True)
        if saved["shape"] != asdict(config.shape) or saved["steps"] != config.steps:
            raise ValueError(f"{path} was written with another shape or number of steps; choose another folder")
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        first, spent = saved["step"], saved["seconds"]
    started = time.perf_counter() - spent
    for number in range(first, config.steps):
        loss, told = step(number)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, config.clip)
        optimizer.step()
        lr = float(schedule.get_last_lr()[0])
        schedule.step()
        seconds = time.perf_counter() - started
        if on_progress is not None:
            done = {"step": number + 1, "steps": config.steps, "loss": loss.item()}
            on_progress({**done, **told, "lr": lr, "seconds": seconds})
        if (number + 1) % config.checkpoint_every == 0 or number + 1 == config.steps:
            state = {name: part.state_dict() for name, part in parts.items()}
            facts = {"shape": asdict(config.shape), "steps": config.steps, "step": number + 1, "seconds": seconds}
            save_checkpoint(path, state | facts)


def save_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write the checkpoint beside its place and move it in, so that a killed run leaves the last whole one."""
    import torch

    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)  # so that a link of that name is not written through
    torch.save(dict(state), fresh)
    fresh.replace(path)
