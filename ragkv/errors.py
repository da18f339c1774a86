"""Every error that ragkv raises on purpose; each message says what is wrong and what to do about it.

The command line turns a `RagkvError` into one sentence and an exit code, so a message is a full sentence without
a traceback's help: name the thing (path, option, model), then the remedy.
"""

from __future__ import annotations

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
    """Base of all deliberate errors; `exit_code` is what the command line ends with."""

    exit_code = 1


class UsageError(RagkvError):
    """The request itself is wrong (unknown engine, top-k below 1, empty question): nothing was tried."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration value or file is invalid."""


class PromptTooLongError(UsageError):
    """A prompt needs more positions than the model has."""


class StoreError(RagkvError):
    """The document store cannot be opened, read or written."""


class StoreAccessError(StoreError):
    """The system does not let this user write to the store (or read it): permissions, or a read-only mount."""


class StoreBusyError(StoreError):
    """Another process does long writing work on the store; the message names it."""


class StoreExistsError(StoreError):
    """There is a finished store where a new one was to be made."""


class StoreFullError(StoreError):
    """The disk or quota under the store is full; the transaction was undone and nothing committed is lost."""


class CorruptStoreError(StoreError):
    """The environment or a record that the store cannot do without is damaged."""


class KVLostError(StoreError):
    """A KV record was deleted, replaced or damaged while it was read layer by layer."""


class KVMismatchError(RagkvError):
    """The index was built by another model, or with another prompt, than the one asked to read it."""


class ModelLoadError(RagkvError):
    """A checkpoint or tokenizer cannot be loaded."""


class UnsupportedModelError(RagkvError):
    """The model loads, but ragkv cannot run it exactly, so it does not run it at all."""


class MissingExtraError(RagkvError):
    """A feature needs an optional dependency that is not installed."""


class IngestError(RagkvError):
    """Nothing at all could be ingested from what was given."""


class RetrievalError(RagkvError):
    """The retrieval index cannot be built or searched."""


class AnswerInterruptedError(RagkvError):
    """An answer was broken off: its index was closed, or the pass that it was part of was interrupted."""
