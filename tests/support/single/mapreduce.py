"""MapReduce: the summaries of all chunks as rows of one batch, then an answer from them (PCED Appendix A.2)."""

from __future__ import annotations

from ragkv.attention.kv import PlacedChunk
from ragkv.engines import Request
from ragkv.engines.mapreduce import MapReduceConfig
from ragkv.model.language_model import LanguageModel
from single.attention import Group, Rows
from single.causal import CausalStream, Stream

__all__ = ["mapreduce"]


def mapreduce(model: LanguageModel, config: MapReduceConfig, request: Request) -> Stream:
    assert request.prompt is not None
    ids: list[int] = []
    for summary in _summaries(model, config, request):
        text = model.tokens.decode(summary).strip()
        ids += request.prompt.chunk_ids(model.tokens, text) if text else ()
    before = [Group(segments=request.before)]
    return CausalStream(model, [*ids, *request.suffix_ids], start=request.prefix_tokens, groups=before)


def _summaries(model: LanguageModel, config: MapReduceConfig, request: Request) -> list[list[int]]:
    assert request.prompt is not None
    segments = [PlacedChunk(kv=request.chunks[i].stored(), start=request.prefix_tokens) for i in request.filled]
    found: list[list[int]] = [[] for _ in segments]
    if not found:
        return found
    asked = request.prompt.suffix_ids(model.tokens, config.instruction.replace("{question}", request.question))
    groups = [Group(segments=(segment,), row=row) for row, segment in enumerate(segments)]
    rows = Rows(model, [Group(segments=request.before), *groups], [segment.end for segment in segments])
    ids: list[list[int]] = [list(asked)] * len(segments)
    running = set(range(len(segments)))
    for _ in range(config.summary_tokens):
        chosen = rows.read(ids).argmax(-1).tolist()
        for row, token_id in enumerate(chosen):
            if token_id in model.eos_ids:
                running.discard(row)
            elif row in running:
                found[row].append(token_id)
        if not running:
            break
        ids = [[token_id] for token_id in chosen]  # a row that has ended runs on, unread
    return found
