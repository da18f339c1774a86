"""The errors that ragkv raises deliberately. Each message says what is wrong and what to do about it.

The command line prints the message of a `RagkvError` without a traceback and exits with its code. So a message names
the path, option or model that is wrong, and then the remedy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def install_hint(*extras: str) -> str:
    """The command that installs an extra: "run pip install …". ragkv is installed from its checkout, not by name."""
    return f"run pip install -e '.[{','.join(extras)}]' in ragkv's checkout"


class RagkvError(Exception):
    """The base of all deliberate errors; `exit_code` is the exit code of the command line.

    `param` is the Python name of the invalid parameter (`top_k`), if there is one. Messages name it as the command
    line does (`--top-k`); the server replaces that by the name in its own protocol.
    """

    exit_code = 1

    def __init__(self, *given: object, param: str | None = None) -> None:
        super().__init__(*given)
        self.param = param


class UsageError(RagkvError):
    """The request is invalid (unknown engine, top-k below 1, empty question); nothing was done."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration value or file is invalid."""


class PromptTooLongError(UsageError):
    """A prompt needs more positions than the model has."""


class StoreError(RagkvError):
    """The document store cannot be opened, read or written."""


class StoreAccessError(StoreError):
    """Permissions or a read-only mount prevent reading or writing the store."""


class StoreBusyError(StoreError):
    """Another process holds the store's writer lock; the message names it."""


class StoreExistsError(StoreError):
    """A new store cannot be made because there is one already."""


class StoreGoneError(StoreError):
    """The store's files were deleted, moved or replaced while it was open."""


class StoreFullError(StoreError):
    """The store's disk or quota is full; the transaction was undone, and nothing that was committed is lost."""


class CorruptStoreError(StoreError):
    """The LMDB environment is damaged, or a row that cannot be rebuilt."""


class KVMismatchError(RagkvError):
    """The index was built with another model or prompt than the one that would read it."""


class ModelLoadError(RagkvError):
    """A checkpoint or tokenizer cannot be loaded."""


class UnsupportedModelError(RagkvError):
    """The model can be loaded, but ragkv cannot run it exactly and therefore refuses it."""


class MissingExtraError(RagkvError):
    """A feature needs an optional dependency that is not installed."""


@contextmanager
def extra(need: str, *extras: str, param: str | None = None) -> Iterator[None]:
    """Around the imports of a feature: MissingExtraError, "NEED; run pip install …", if one fails."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(f"{need}; {install_hint(*extras)}.", param=param) from error


class IngestError(RagkvError):
    """Nothing could be ingested; `skipped` are the files that were skipped, each with its reason."""

    def __init__(self, message: str, skipped: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.skipped = tuple(skipped)


class RetrievalError(RagkvError):
    """The retrieval index cannot be built or searched."""


class NothingFoundError(RetrievalError):
    """No chunk matches the question, or the index holds no document."""


class AnswerInterruptedError(RagkvError):
    """An answer was cut short: its index was closed, or its forward pass was interrupted."""


class ModelServerError(RagkvError):
    """The server that runs the model (vLLM) does not answer, or cannot serve the index."""


class RanksError(RagkvError):
    """One of the processes that encode a document together is lost, too slow, or has another model than the others."""
