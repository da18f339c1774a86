"""MapReduce, PCED's agentic baseline (PCED §4, Appendix A.2): a summary of every chunk, then an answer from them.

The package registers it as an engine.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragkv.attention.kv import PlacedChunk
from ragkv.attention.sequence import TokenSequence
from ragkv.engines.base import (
    Argmax,
    Demand,
    Engine,
    Forward,
    ModelFacts,
    Operation,
    Program,
    Release,
    Request,
    answer_from,
)
from ragkv.errors import ConfigError
from ragkv.types import Encoding

if TYPE_CHECKING:
    from ragkv.model.prompt import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class MapReduceConfig:
    """`instruction` replaces the question in the map prompt; `{question}` in it becomes the user's question.

    The default is the paper's, which does not mention the question (Appendix A.2). The paper states no length.
    """

    instruction: str = "Summarize the given documents concisely, focusing on the key points and main ideas."
    summary_tokens: int = 128

    def __post_init__(self) -> None:
        if not self.instruction.strip():
            raise ConfigError("mapreduce: instruction must not be empty.")
        if self.summary_tokens < 1:
            raise ConfigError("mapreduce: summary_tokens must be at least 1.")


class MapReduce(Engine):
    """Map: [prefix, chunk, instruction] per chunk, decoded greedily. Reduce: [prefix, summaries, question] as one
    sequence.

    `prefixed` chunk KV is that of a chunk right after the prefix, so the map prompts are read from the store, all
    chunks in one batch, with the numbers of an ordinary prefill; only the summaries are new.
    """

    name = "mapreduce"
    encoding = Encoding.PREFIXED
    Config = MapReduceConfig
    needs = frozenset()

    def demand(self, request: Request, max_new_tokens: int) -> Demand:
        config: MapReduceConfig = self.config
        chunks = len(request.filled)
        asked = len(self._instruction(request).encode()) + len(request.suffix_ids)  # a token is a byte or more
        reduced = chunks * config.summary_tokens + len(request.suffix_ids) + max_new_tokens
        return Demand(sequences=max(chunks, 1), tokens=max(chunks * (asked + config.summary_tokens), reduced))

    def program(self, request: Request, model: ModelFacts) -> Program:
        if request.prompt is None:
            raise ValueError("mapreduce writes a prompt of its own, but the request came without `prompt`")
        ids: list[int] = []
        for summary in (yield from self.summaries(request, model, request.prompt)):
            text = model.tokens.decode(summary).strip()
            ids += request.prompt.chunk_ids(model.tokens, text) if text else ()
        sequence = TokenSequence.over(request.before, position=request.prefix_tokens)
        yield from answer_from(sequence, (*ids, *request.suffix_ids))

    def _instruction(self, request: Request) -> str:
        config: MapReduceConfig = self.config
        return config.instruction.replace("{question}", request.question)

    def summaries(
        self, request: Request, model: ModelFacts, prompt: Prompt
    ) -> Generator[Operation, Any, list[list[int]]]:
        """Generated ids per chunk, end token excluded."""
        config: MapReduceConfig = self.config
        at, notes = request.prefix_tokens, dict[TokenSequence, list[int]]()
        for index in request.filled:
            kv = request.chunks[index].stored()
            notes[TokenSequence.over((*request.before, PlacedChunk(kv=kv, start=at)), position=at + kv.tokens)] = []
        asked = prompt.suffix_ids(model.tokens, self._instruction(request))
        running: dict[TokenSequence, Sequence[int]] = dict.fromkeys(notes, asked)
        for _ in range(config.summary_tokens):
            if not running:
                break
            chosen = yield Argmax((yield Forward(list(running), list(running.values()))))
            for sequence, token_id in zip(list(running), chosen, strict=True):
                if token_id in model.eos_ids:
                    del running[sequence]
                    yield Release((sequence,))
                else:
                    notes[sequence].append(token_id)
                    running[sequence] = (token_id,)
        yield Release(list(running))
        return list(notes.values())
