"""A text that is encoded in blocks for one question, which stands in the anchor (APB §3.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ragkv.model.apb.book import Book
from ragkv.model.apb.choice import compressor_for
from ragkv.model.apb.layout import Layout, Lengths

if TYPE_CHECKING:
    from ragkv.attention.kv import ChunkKV
    from ragkv.model.language import LanguageModel

__all__ = ["BlockSettings", "book_for_question"]


class BlockSettings(Protocol):
    """`ragkv.engines.apb.APBConfig`, as far as encoding needs it."""

    @property
    def compressor(self) -> str: ...

    @property
    def preset(self) -> str: ...

    @property
    def question(self) -> bool: ...

    def lengths(self, tokens: int) -> Lengths | None: ...


def book_for_question(
    model: LanguageModel,
    settings: BlockSettings,
    ids: tuple[int, ...],
    question_ids: tuple[int, ...],
    prefix: ChunkKV | None,
) -> Book | None:
    """The text `ids` after `prefix`, cut and compressed as `settings` say; None where one block holds it."""
    lengths = settings.lengths(len(ids))
    if lengths is None or len(ids) <= lengths.block:
        return None
    start = 0 if prefix is None else prefix.tokens
    compressor = compressor_for(
        settings.compressor, model, question_ids=question_ids, prefix=prefix, position=start + len(ids)
    )
    head = question_ids if settings.question and settings.preset == "apb" else ()
    layout = Layout(tokens=len(ids), lengths=lengths, start=start, question=len(head))
    return Book(model=model, layout=layout, ids=ids, compressor=compressor, prefix=prefix, question_ids=head)
