"""The training loop of retaining heads and of the bundled models."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ragkv.errors import UsageError
from ragkv.finetune.data import Progress


@dataclass(slots=True, kw_only=True)
class Training:
    """Trains `modules` for `steps` steps. From its checkpoint at `path`, a killed run continues to the same weights.

    The checkpoint is written every `every` steps. It has `settings`, `facts`, and the states
    of the modules by name, of the optimizer and of the schedule. Gradients are clipped to the norm `clip`.
    """

    modules: Mapping[str, nn.Module]
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    steps: int
    path: Path
    settings: Mapping[str, Any]
    every: int
    clip: float = math.inf
    facts: dict[str, Any] = field(default_factory=dict)
    done: int = 0
    seconds: float = 0.0
    losses: dict[str, float] = field(default_factory=lambda: {"loss_first": math.nan, "loss_last": math.nan})

    def resume(self, *, again: str = "--no-resume") -> bool:
        """Continue from the checkpoint, if there is one.

        If it is damaged or has other settings, a UsageError names `again` as the way to begin again.
        """
        if not self.path.exists():
            return False
        try:
            state: dict[str, Any] = torch.load(self.path, map_location="cpu", weights_only=True)
            before = state.pop("settings")
        except Exception as error:  # a damaged pickle can raise any exception
            raise UsageError(f"{self.path} is damaged ({error}); begin again with {again}.") from error
        if before != self._described():
            raise UsageError(f"{self.path} is of a run with other settings, data or model; give those, or {again}.")
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        self.done, self.seconds, self.losses, self.facts = (state[n] for n in ("step", "seconds", "losses", "facts"))
        return True

    def save(self) -> None:
        """Write the checkpoint."""
        state = {name: part.state_dict() for name, part in self._parts().items()}
        state |= {"settings": self._described(), "facts": self.facts}
        save_checkpoint(self.path, state | {"step": self.done, "seconds": self.seconds, "losses": self.losses})

    def run(
        self,
        advance: Callable[[int], Mapping[str, Any]],
        *,
        on_progress: Progress | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        """Take the remaining steps. `advance(number)` adds a step's gradients and returns its figures, with `loss`.

        After every step, `on_progress` receives step, steps, these figures, lr and seconds. If `stop` is set, a
        checkpoint is written and KeyboardInterrupt raised.
        """
        parameters = [weight for module in self.modules.values() for weight in module.parameters()]
        started = time.perf_counter() - self.seconds
        while self.done < self.steps:
            self.optimizer.zero_grad(set_to_none=True)
            figures = advance(self.done)
            nn.utils.clip_grad_norm_(parameters, self.clip)
            self.optimizer.step()
            lr = float(self.schedule.get_last_lr()[0])
            self.schedule.step()
            self.done += 1
            self.seconds = time.perf_counter() - started
            first = figures["loss"] if self.done == 1 else self.losses["loss_first"]
            self.losses = {"loss_first": first, "loss_last": figures["loss"]}
            stopped = stop is not None and stop.is_set()
            if stopped or self.done % self.every == 0 or self.done == self.steps:
                self.save()
            if on_progress is not None:
                counts = {"step": self.done, "steps": self.steps}
                on_progress({**counts, **figures, "lr": lr, "seconds": self.seconds})
            if stopped and self.done < self.steps:
                raise KeyboardInterrupt

    def _parts(self) -> dict[str, Any]:
        return {**self.modules, "optimizer": self.optimizer, "schedule": self.schedule}

    def _described(self) -> str:
        return repr(sorted(self.settings.items()))


def drawn(seed: int, step: int, count: int) -> int:
    """The example of a step, which depends only on the arguments; each epoch has its own order."""
    epoch, place = divmod(step, count)
    return random.Random(f"{seed}:{epoch}").sample(range(count), count)[place]


def save_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write the checkpoint to a temporary file and rename it, so that a killed run leaves the last complete one."""
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)  # so that a link of that name is not followed
    torch.save(dict(state), fresh)
    fresh.replace(path)
