"""The errors that ragkv raises on purpose. Each message says what is wrong and what to do about it.

The command line prints the message of a `RagkvError` and exits with its code. There is no traceback, so that a message
has to name the thing (path, option, model) and then the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "AnswerInterruptedError",
    "ConfigError",
    "CorruptStoreError",
    "IngestError",
    "KVLostError",
    "KVMismatchError",
    "MissingExtraError",
    "ModelLoadError",
    "PromptTooLongError",
    "RagkvError",
    "RanksError",
    "RetrievalError",
    "StoreAccessError",
    "StoreBusyError",
    "StoreError",
    "StoreExistsError",
    "StoreFullError",
    "UnsupportedModelError",
    "UsageError",
]


class RagkvError(Exception):
    """The base of all deliberate errors; `exit_code` is the exit code of the command line."""

    exit_code = 1


class UsageError(RagkvError):
    """The request itself is wrong (unknown engine, top-k below 1, empty question), and nothing was done."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration value or file is invalid."""


class PromptTooLongError(UsageError):
    """A prompt needs more positions than the model has."""


class StoreError(RagkvError):
    """The document store cannot be opened, read or written."""


class StoreAccessError(StoreError):
    """This user may not write to the store, or not read it, because of permissions or a read-only mount."""


class StoreBusyError(StoreError):
    """Another process holds the store's writer lock; the message names it."""


class StoreExistsError(StoreError):
    """There is already a store where a new one was to be made."""


class StoreFullError(StoreError):
    """The store's disk or quota is full; the transaction was undone, and nothing that was committed is lost."""


class CorruptStoreError(StoreError):
    """The LMDB environment is damaged, or a row that cannot be made anew."""


class KVLostError(StoreError):
    """A KV record was deleted, replaced or damaged while it was read layer by layer."""


class KVMismatchError(RagkvError):
    """The index was built by another model, or with another prompt, than those that are to read it."""


class ModelLoadError(RagkvError):
    """A checkpoint or tokenizer cannot be loaded."""


class UnsupportedModelError(RagkvError):
    """The model can be loaded, but ragkv cannot run it exactly, and so does not run it at all."""


class MissingExtraError(RagkvError):
    """A feature needs an optional dependency that is not installed."""


class IngestError(RagkvError):
    """Nothing could be ingested from what was given; `skipped` are its parts, each with the reason, if it had any."""

    def __init__(self, message: str, skipped: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.skipped = tuple(skipped)


class RetrievalError(RagkvError):
    """The retrieval index cannot be built or searched."""


class AnswerInterruptedError(RagkvError):
    """An answer was broken off: its index was closed, or the pass that it was part of was interrupted."""


class RanksError(RagkvError):
    """Of the processes that answer together one is gone, slow, or of another model than the others."""
