"""transformers' Trainer on rows of examples: what it is given beside the rows, what it tells, how it is stopped."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback

from ragkv.finetune.block.rowattention import NAME, RowMask
from ragkv.finetune.trainingloop import Progress
from ragkv.model.language import LanguageModel

__all__ = ["Follower", "RowTrainer", "StopAsked", "stop_on_interrupt"]

logger = logging.getLogger(__name__)


class RowTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose model attends with a `RowMask`, and which takes rows in the order in which they are drawn."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], *arguments: Any, **more: Any) -> Any:
        """The model's own loss over the answers' tokens, for the columns of `trainingrow.collate`."""
        columns = dict(inputs)
        rows = RowMask(
            positions=columns["position_ids"],
            **{name: columns.pop(name) for name in ("segments", "asks", "block", "causal")},
        )
        return super().compute_loss(model, {**columns, "ragkv_rows": rows, "use_cache": False}, *arguments, **more)

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)


class StopAsked:
    """Whether a stop after the current step was requested."""

    def __init__(self) -> None:
        self.asked = False


@contextmanager
def stop_on_interrupt() -> Iterator[StopAsked]:
    """Let the first Ctrl-C request a stop after the current step, and a checkpoint; a second one interrupts at once.

    Outside the main thread, which alone receives signals, nothing changes.
    """
    stop = StopAsked()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.getsignal(signal.SIGINT)

    def ask(number: int, frame: Any) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True
        logger.warning("stopping after this step and writing a checkpoint; interrupt again to stop at once.")

    signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


class Follower(TrainerCallback):  # type: ignore[misc]
    """Reports every step, passes the model to `on_step`, and ends the training when a stop was requested."""

    def __init__(
        self,
        model: LanguageModel,
        stop: StopAsked,
        *,
        on_progress: Progress | None,
        on_step: Callable[[int, LanguageModel], None] | None,
    ) -> None:
        self._model, self._stop = model, stop
        self._on_progress, self._on_step = on_progress, on_step
        self._began = time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            self._lend(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        self._lend(state.global_step)
        if self._stop.asked:
            control.should_save = control.should_training_stop = True
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Report steps and evaluations as they are logged. An evaluation names its layout and has no learning rate."""
        if self._on_progress is None or not state.is_world_process_zero:
            return
        told = {name: value for name, value in (logs or {}).items() if name in ("loss", "learning_rate", "grad_norm")}
        told |= {name: value for name, value in (logs or {}).items() if name in ("eval_full_loss", "eval_block_loss")}
        if told:
            seconds = time.monotonic() - self._began
            self._on_progress({"step": state.global_step, "steps": state.max_steps, **told, "seconds": seconds})

    def _lend(self, step: int) -> None:
        if self._on_step is None:
            return
        module = self._model.module
        training = module.training
        module.set_attn_implementation("ragkv")
        module.eval()
        try:
            self._on_step(step, self._model)
        finally:
            module.train(training)
            module.set_attn_implementation(NAME)
