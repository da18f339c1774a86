"""APB: whole long documents, encoded in blocks that see an anchor and what earlier blocks pass on (APB §3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ragkv.attention.kv import PlacedChunk
from ragkv.attention.sequence import TokenSequence
from ragkv.config import require_types
from ragkv.engines.base import Engine, ModelFacts, Program, Request, answer_from
from ragkv.errors import ConfigError
from ragkv.model.apb.document import BlockLengths, lengths_for, star
from ragkv.types import Capability, Encoding


@dataclass(frozen=True, slots=True, kw_only=True)
class APBConfig:
    """`block`, `anchor` and `passing` are l_b, l_a and l_p in tokens. "auto": the paper's lengths for the document's
    length; if only `block` is given, anchor and passing are a quarter and an eighth of it.

    `preset` "star" is Star Attention: the first block is the anchor, and nothing is passed on. `compressor` chooses
    what is passed on: trained retaining `heads`, `attention` of the question (for questions about files), `key-norm`,
    or `random`. "auto" takes the heads beside the model if there are any, else the question's attention if there is a
    question, else key norms. `question` puts the question, if there is one, into the anchor.
    """

    preset: Literal["apb", "star"] = "apb"
    block: int | str = "auto"
    anchor: int | str = "auto"
    passing: int | str = "auto"
    compressor: Literal["auto", "attention", "heads", "key-norm", "random"] = "auto"
    question: bool = True

    def __post_init__(self) -> None:
        require_types(self, "apb: ")
        for name in ("block", "anchor", "passing"):
            value = getattr(self, name)
            if isinstance(value, bool) or (value != "auto" and not isinstance(value, int)):
                raise ConfigError(f'apb: {name} must be a number of tokens or "auto", not {value!r}.')
        if self.block == "auto" and (self.anchor, self.passing) != ("auto", "auto"):
            raise ConfigError("apb: anchor and passing are given together with block; set block too.")
        if self.preset == "star" and (self.anchor, self.passing) != ("auto", "auto"):
            raise ConfigError('apb: preset = "star" settles anchor and passing; leave them out.')
        self.lengths(1 << 20)  # raises for lengths that are inconsistent

    def lengths(self, tokens: int) -> BlockLengths | None:
        """The lengths for a document of `tokens` tokens; None where plain attention is the better choice."""
        lengths = lengths_for(tokens)
        if isinstance(self.block, int):
            anchor = self.anchor if isinstance(self.anchor, int) else self.block // 4
            passing = self.passing if isinstance(self.passing, int) else self.block // 8
            lengths = BlockLengths(block=self.block, anchor=anchor, passing=passing)
        return star(lengths.block) if lengths is not None and self.preset == "star" else lengths


class APB(Engine):
    """Reads whole documents. The blocks of a document keep their positions; documents follow one another.

    A chunk outside of a whole document is a document of one block, encoded as for `pced` and `ape`.
    """

    name = "apb"
    encoding = Encoding.PREFIXED
    Config = APBConfig
    whole_documents = True
    needs = frozenset(Capability)

    def program(self, request: Request, model: ModelFacts) -> Program:
        chunks = self._placed(request)
        end = chunks[-1].end if chunks else request.prefix_tokens
        return answer_from(TokenSequence.over((*request.before, *chunks), position=end), request.suffix_ids)

    def _placed(self, request: Request) -> list[PlacedChunk]:
        start = end = first = request.prefix_tokens
        chunks: list[PlacedChunk] = []
        for index in request.filled:
            kv = request.chunks[index].stored()
            if kv.encoded_at == first:  # every document begins there
                start = end
            chunks.append(PlacedChunk(kv=kv, start=start + kv.encoded_at - first))
            end = chunks[-1].end
        return chunks
