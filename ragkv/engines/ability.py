"""Which engines a model can run exactly: what an engine needs (`Engine.needs`) against what the model lacks.

A model that is loaded is exact for `full` and for every other engine that reads each chunk where it was encoded. What
else it bears its proof on load found out, with the reason where it does not (`LanguageModel.lacks`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ragkv.engines.registry import engine_names, make_engine
from ragkv.errors import PromptTooLongError, UnsupportedModelError
from ragkv.types import Need

if TYPE_CHECKING:
    from ragkv.engines.base import Engine, ModelFacts

__all__ = ["able_engines", "able_or", "refusal", "require_able", "require_reach"]

_PREFERRED = ("ape", "pced", "full")


def refusal(engine: Engine, model: ModelFacts) -> str | None:
    """Why `model` cannot run `engine` exactly, as the middle of a sentence; None where it can."""
    return next((model.lacks[need] for need in sorted(engine.needs) if need in model.lacks), None)


def require_able(engine: Engine, model: ModelFacts) -> None:
    """UnsupportedModelError, with the reason and an engine that works, where `model` cannot run `engine` exactly."""
    reason = refusal(engine, model)
    if reason is not None:
        raise UnsupportedModelError(
            f"Engine {engine.name!r} cannot run on model {model.checkpoint.name!r}: {reason}; "
            f"use engine {able_or(_PREFERRED, model)!r}."
        )


def require_reach(engine: Engine, model: ModelFacts, positions: int) -> None:
    """PromptTooLongError where `engine` would move chunks further than `model` bears."""
    most = model.moves_within
    if most is not None and positions > most and Need.MOVE in engine.needs:
        raise PromptTooLongError(
            f"Engine {engine.name!r} moves chunks, which model {model.checkpoint.name!r} bears in prompts of up to "
            f"{most} positions, not {positions}; lower --top-k, or use engine {able_or(_PREFERRED, model)!r}."
        )


def able_engines(model: ModelFacts) -> list[str]:
    """The names of all engines, as they are without tuning, that `model` runs exactly."""
    return [name for name in engine_names() if refusal(make_engine(name, {}), model) is None]


def able_or(names: Iterable[str], model: ModelFacts) -> str:
    """The first of these engines that `model` runs exactly, or one that it does."""
    wanted = (*names, *_PREFERRED)
    return next(name for name in wanted if refusal(make_engine(name, {}), model) is None)
