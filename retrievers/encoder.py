"""What every embedder and reranker needs around its forward pass: limits, a lock, clear errors, and batches."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ragkv.boundary.visible import first_sentence
from ragkv.errors import ConfigError, ModelLoadError, RetrievalError
from ragkv.model.control import readable
from ragkv.retrievers.layout import Folder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = [
    "CheckpointModel",
    "blank",
    "by_length",
    "in_batches",
    "loading",
    "padded",
    "readable",
    "require_numbers",
    "require_weights",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class CheckpointModel:
    """A model from a checkpoint folder, with the limits that it runs with. Subclasses load it and run it."""

    def __init__(self, folder: Folder, *, max_tokens: int | None, batch_size: int) -> None:
        """`max_tokens` as `Folder.max_tokens`; `batch_size` counts texts, or pairs of question and text."""
        self._folder = folder
        self.name = folder.name
        if batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, not {batch_size}.")
        self.max_tokens = folder.max_tokens(max_tokens)
        self._batch_size = batch_size
        self._lock = threading.Lock()  # one forward pass at a time

    @cached_property
    def fingerprint(self) -> str:
        """Read from the files when first asked for (`Embedder.fingerprint`)."""
        return self._folder.fingerprint(self.max_tokens)


def blank(text: str) -> bool:
    """Whether there is nothing to embed."""
    return not text.strip()


@contextmanager
def loading(what: str, name: str, *, reports: bool = False) -> Iterator[None]:
    """Load a checkpoint without progress bars. Whatever goes wrong in the libraries becomes a ModelLoadError."""
    from ragkv.model.loading import quiet_loading, wants_code

    try:
        with quiet_loading(reports=reports):
            yield
    except (ConfigError, ModelLoadError):
        raise
    except RetrievalError as error:  # from the trial run
        raise ModelLoadError(str(error)) from error
    except Exception as error:  # for a broken file, each of the libraries raises its own errors
        if wants_code(error):
            raise ModelLoadError(
                f"{what} {name!r} wants to run Python code of its own, which ragkv never does; give a model that "
                "transformers or sentence-transformers itself can run."
            ) from error
        raise ModelLoadError(
            f"{what} {name!r} cannot be loaded: {first_sentence(error)}. Fetch the model again."
        ) from error


def by_length(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Indices in batches of at most `size`, the longest first, so that there is little padding."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    return [order[start : start + size] for start in range(0, len(order), size)]


def in_batches(rows: Sequence[Sequence[int]], size: int, run: Callable[[list[int]], list[T]]) -> list[T]:
    """Call `run` with the indices of rows in batches; results are in the order of the rows.

    Batches become smaller when memory is short. Raises RetrievalError when even one row does not fit, or when the model
    fails in another way.
    """
    import torch

    done: dict[int, T] = {}
    waiting = by_length([len(row) for row in rows], size)[::-1]
    while waiting:
        batch = waiting.pop()
        try:
            done.update(zip(batch, run(batch), strict=True))
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            short = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
            if short and len(batch) > 1:
                half = len(batch) // 2
                logger.warning("no memory for %d texts at once; going on with %d", len(batch), half)
                waiting += [batch[half:], batch[:half]]
                continue
            remedy = "lower max_tokens" if short else "check the model with a shorter text"
            raise RetrievalError(
                f"A text of {len(rows[batch[0]])} tokens failed: {first_sentence(error)}; {remedy}."
            ) from error
    return [done[i] for i in range(len(rows))]


def padded(rows: Sequence[Sequence[int]], pad: int, device: Any) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask` of token ids, both (batch, longest)."""
    import torch

    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), pad, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
        mask[index, : len(row)] = 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def require_numbers(name: str, *arrays: NDArray[np.float32] | None) -> None:
    """RetrievalError for NaN and infinities, so that a fault does not become a stored vector or a rank."""
    import numpy as np

    if not all(array is None or np.isfinite(array).all() for array in arrays):
        raise RetrievalError(f"Model {name!r} gave infinite or undefined numbers; run it on the CPU or fetch it again.")


def require_weights(model: Any, folder: Path, what: str, name: str) -> None:
    """Refuse a model if a weight is missing in its files: transformers would fill it with random numbers.

    The pooler may be missing, because nothing here uses it.
    """
    prefix = f"{model.base_model_prefix}."
    there = {_plain(key, prefix) for key in _stored_keys(folder)}
    absent = [key for key, _ in model.named_parameters() if _plain(key, prefix) not in there and "pooler." not in key]
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise ModelLoadError(
            f"{what} {name!r} lacks weights ({absent[0]}{more}), which would be random; fetch the model again."
        )


def _plain(key: str, prefix: str) -> str:
    """A weight's name without what differs between versions of transformers."""
    key = key.removeprefix(prefix)
    return key.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _stored_keys(folder: Path) -> set[str]:
    import torch
    from safetensors import safe_open

    keys: set[str] = set()
    if tensors := sorted(folder.glob("*.safetensors")):
        for path in tensors:
            with safe_open(path, framework="pt") as file:
                keys.update(file.keys())
        return keys
    for path in sorted(folder.glob("pytorch_model*.bin")):
        keys.update(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
    return keys
