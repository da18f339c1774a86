"""MapReduce, PCED's agentic baseline (PCED §4, Appendix A.2): a summary of every chunk, then an answer from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ragkv.attention.context import Context, ContextGroup
from ragkv.attention.kv import PlacedKV
from ragkv.engines.base import CausalStream, Engine, Request
from ragkv.errors import ConfigError
from ragkv.types import Encoding

if TYPE_CHECKING:
    from ragkv.model.language import LanguageModel
    from ragkv.model.prompt import Prompt

__all__ = ["MapReduce", "MapReduceConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MapReduceConfig:
    """`instruction` takes the question's place in the map prompt; `{question}` in it stands for the user's.

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
    """Map: [prefix, chunk, instruction] per chunk, greedily. Reduce: [prefix, summaries, question], one sequence.

    A chunk that follows the prefix alone is what `prefixed` chunk KV holds, so the map prompts are read from the
    store, all chunks as rows of one batch, with the numbers of an ordinary prefill; the summaries alone are new.
    """

    name = "mapreduce"
    encoding = Encoding.PREFIXED
    Config = MapReduceConfig

    def start(self, model: LanguageModel, request: Request) -> CausalStream:
        if request.prompt is None:
            raise ValueError("mapreduce writes a prompt of its own, but the request came without `prompt`")
        ids: list[int] = []
        for summary in self.summaries(model, request, request.prompt):
            text = model.tokens.decode(summary).strip()
            ids += request.prompt.chunk_ids(model.tokens, text) if text else ()
        return CausalStream(
            model, [*ids, *request.suffix_ids], start=request.prefix_tokens, context=Context(groups=_prefix(request))
        )

    def summaries(self, model: LanguageModel, request: Request, prompt: Prompt) -> list[list[int]]:
        """Generated ids per chunk, end token excluded; cut where they are when the request is cancelled."""
        config: MapReduceConfig = self.config
        chunks = [request.chunks[index] for index in request.filled]
        found: list[list[int]] = [[] for _ in chunks]
        if not found:
            return found
        asked = prompt.suffix_ids(model.tokens, config.instruction.replace("{question}", request.question))
        at = request.prefix_tokens
        rows = tuple(
            ContextGroup(chunks=(PlacedKV(kv=chunk.stored(), start=at),), row=row) for row, chunk in enumerate(chunks)
        )
        context, own = Context(groups=(*_prefix(request), *rows)), model.own()
        following = torch.tensor([at + chunk.stored().tokens for chunk in chunks], device=model.device)
        model.require_positions(int(following.max()) + len(asked) + config.summary_tokens - 1)
        tokens = torch.tensor(asked, device=model.device).expand(len(found), -1)  # (chunks, n)
        running = set(range(len(found)))
        for _ in range(config.summary_tokens):
            positions = following[:, None] + torch.arange(tokens.shape[1], device=model.device)
            chosen = model.forward(tokens, positions, context=context, own=own).argmax(-1)  # (chunks,)
            for row, token_id in enumerate(chosen.tolist()):
                if token_id in model.eos_ids:
                    running.discard(row)
                elif row in running:
                    found[row].append(token_id)
            if not running or (request.cancelled is not None and request.cancelled()):
                break
            following = following + tokens.shape[1]
            tokens = chosen[:, None]  # a finished row runs on, unread, until the longest summary ends
        return found


def _prefix(request: Request) -> tuple[ContextGroup, ...]:
    return () if request.prefix is None else (ContextGroup(chunks=(PlacedKV(kv=request.prefix, start=0),)),)
