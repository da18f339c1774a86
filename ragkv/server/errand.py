"""What a command has done by an open index, in its own process or in a server's: the same functions for both.

`tell` is given what is to be said on stderr. Errors are those of the facade. Nothing here needs a server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ragkv
from ragkv.errors import KVMismatchError

if TYPE_CHECKING:
    from ragkv.index.answer import AnswerStream
    from ragkv.pipeline import RagKV

__all__ = ["Question", "Talk", "Turn", "answer", "begin", "choose", "identity", "list_page", "reply", "welcome"]

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """`ragkv query`: `options` are those of `RagKV.stream`. `place` is the index as the user named it."""

    text: str
    place: str
    model: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    quiet: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """How a conversation of `ragkv chat` is answered: what all of its questions have in common."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    history_tokens: int = 512
    quiet: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The next question of a conversation, and the finished turns before it: question and answer."""

    text: str
    engine: str
    earlier: Sequence[tuple[str, str]] = ()


def identity() -> str:
    """What server and client must have in common to answer alike: ragkv's version, and where it is installed."""
    return f"{ragkv.__version__} in {Path(ragkv.__file__).parent}"


def answer(rag: RagKV, asked: Question, tell: Tell) -> AnswerStream:
    """The answer to a question, not begun yet."""
    welcome(rag, asked.place, asked.model, tell, quiet=asked.quiet)
    stream = rag.stream(asked.text, **asked.options)
    if not asked.quiet and (warning := stream.warning):
        tell(warning)
    return stream


def welcome(rag: RagKV, place: str, model: str | None, tell: Tell, *, quiet: bool) -> None:
    """What stands before questions: KVMismatchError unless the index was made by `model`, and the warning of mini."""
    if model is not None and model != rag.config.model:
        raise KVMismatchError(
            f"The index at {place} was made by model {rag.config.model!r}, not {model!r}; "
            "leave --model out, or ingest the documents into another --index."
        )
    if not quiet:
        _tell_mini(rag, tell)


def begin(rag: RagKV, talk: Talk, engine: str | None, tell: Tell) -> str:
    """Check a conversation's settings and load the model; returns the engine that answers."""
    # A stream does nothing until it is read, but it checks its settings: refuse wrong ones before the model loads.
    rag.stream("?", engine=engine, **talk.settings)
    rag.index.require_same_model()
    if not talk.quiet:
        _tell_mini(rag, tell)
    return choose(rag, talk, engine or rag.config.default_engine, tell)


def choose(rag: RagKV, talk: Talk, engine: str, tell: Tell) -> str:
    """The engine, if there is one of this name (UsageError), with its warning."""
    from ragkv.engines import make_engine

    warning = make_engine(engine, rag.config.tuning).warning(rag.model)
    if warning and not talk.quiet:
        tell(warning)
    return engine


def reply(rag: RagKV, talk: Talk, turn: Turn) -> AnswerStream:
    """The answer to a conversation's next question, not begun yet."""
    from ragkv.index.conversation import Conversation

    tokens = rag.model.tokens
    conversation = Conversation(
        rag.config.prompt, lambda text: len(tokens.encode(text)), history_tokens=talk.history_tokens
    )
    for question, answered in turn.earlier:
        conversation.add(question, answered)
    return rag.stream(
        conversation.prompt_text(turn.text),
        engine=turn.engine,
        search_for=conversation.search_text(turn.text),
        **talk.settings,
    )


def list_page(
    rag: RagKV, names: Sequence[str], where: Sequence[str], *, after: str, limit: int | None
) -> dict[str, Any]:
    """What `ragkv ls --json` prints."""
    page = rag.list_documents(names, where, after=after, limit=limit)
    total = rag.stats().documents
    return {"documents": [one.to_json() for one in page.documents], "after": page.after, "total": total}


def _tell_mini(rag: RagKV, tell: Tell) -> None:
    from ragkv.index.mininote import question_note

    if said := question_note(rag.config, rag.store):
        tell(said)
