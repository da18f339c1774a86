"""A question with its conversation, in the words that are searched for and those that the prompt holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from ragkv.index.conversation import Conversation
from ragkv.server.failure import Refusal

if TYPE_CHECKING:
    from ragkv.pipeline import RagKV

__all__ = ["Words", "require_unicode", "worded"]


class Words(NamedTuple):
    """A question as it is searched for, and as the prompt holds it."""

    search: str
    prompt: str


def worded(rag: RagKV, question: str, turns: Iterable[tuple[str, str]], instructions: Iterable[str] = ()) -> Words:
    """The words of a question after earlier `turns`, each a question and its answer, as `ragkv chat` uses them.

    `instructions` stand before it all: the prompt's own beginning is that of the stored KV and cannot change.
    Refusal for text that is no Unicode.
    """
    conversation = Conversation(rag.config.prompt, lambda text: len(rag.model.tokens.encode(text)))
    turns, said = list(turns), list(instructions)
    require_unicode([question, *said, *(text for turn in turns for text in turn)])
    for asked, answered in turns:
        conversation.add(asked, answered)
    return Words(conversation.search_text(question), "\n\n".join([*said, conversation.prompt_text(question)]))


def require_unicode(texts: Iterable[str]) -> None:
    """Refusal for half of a surrogate pair, which JSON can say and no tokenizer takes."""
    for text in texts:
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise Refusal(400, "A text of the request is not valid Unicode: it holds half of a surrogate pair.")
