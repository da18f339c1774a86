"""Make chunk KV ahead: for questions, for documents, or for what was retrieved most.

What is wanted is recorded as uses that are expected, so that the budget keeps it by the same worth as what questions
have used, and made in the order of that worth: nothing that is made pushes out what was made before it.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from ragkv.errors import RetrievalError
from ragkv.index.finder import Finder
from ragkv.index.index import Index
from ragkv.index.recall import Recall
from ragkv.index.task import Asked, settle_asked
from ragkv.ingest import batches_of, encode_identities
from ragkv.store import KVIdentity, StoredDocument, Use
from ragkv.store.transaction import digest
from ragkv.store.worth import used
from ragkv.types import Chunk, Encoding

__all__ = ["Wanted", "Warming", "of_documents", "of_questions", "of_the_most_used", "warm"]

Wanted = dict[KVIdentity, tuple[str, int]]
"""KV that is expected to be used: the id of a chunk that needs it, and how many times."""


@dataclass(slots=True, kw_only=True)
class Warming:
    """What came of it, in chunk KVs.

    `wanted` are `present` already, `made` now, or `refused`: the budget holds what is worth more. `tokens`, `bytes` and
    `seconds` are of those that were made.
    """

    wanted: int = 0
    present: int = 0
    made: int = 0
    refused: int = 0
    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The object that `ragkv warm --json` prints."""
        return {**asdict(self), "seconds": round(self.seconds, 3)}


def of_questions(
    index: Index,
    recall: Recall,
    finder: Finder,
    questions: Iterable[str | Asked],
    on_question: Callable[[int], None] = lambda done: None,
) -> Wanted:
    """What these questions would read; one that finds nothing wants nothing."""
    times: Counter[KVIdentity] = Counter()
    owners: dict[KVIdentity, str] = {}
    for number, asked in enumerate(questions):
        on_question(number)
        task = settle_asked(index.config, asked, {})
        encoding = task.engine.encoding
        if encoding is None or task.engine.whole_documents:
            continue
        try:
            found = finder.find(task.question, task.search)[: task.engine.most_chunks]
        except RetrievalError:
            continue
        for scored in found:
            identity = recall.identity(encoding, scored.chunk.token_ids)
            times[identity] += 1
            owners[identity] = scored.chunk.chunk_id
    return {identity: (owners[identity], count) for identity, count in times.items()}


def of_documents(
    index: Index, recall: Recall, documents: Iterable[StoredDocument], encodings: Sequence[Encoding]
) -> Wanted:
    """The chunks of these documents, each once."""
    return {
        recall.identity(encoding, chunk.token_ids): (chunk.chunk_id, 1)
        for stored in documents
        for chunk in index.store.chunks(stored.document.document_id)
        for encoding in encodings
    }


def of_the_most_used(index: Index, recall: Recall, count: int, encodings: Sequence[Encoding]) -> Wanted:
    """The `count` chunks that questions have used most and lately, in the encodings in which they used them.

    If the prompt or the model has changed since, in `encodings`.
    """
    weights: dict[bytes, float] = {}
    keys: set[bytes] = set()
    for key, row in index.store.uses():
        keys.add(key)
        weights[row.owner] = used(weights[row.owner], row.weight) if row.owner in weights else row.weight
    best = heapq.nlargest(count, weights, key=lambda owner: (weights[owner], owner))
    chunks = index.store.chunks_of(best)
    wanted: Wanted = {}
    for owner in best:
        if owner in chunks:
            wanted |= _as_used(recall, chunks[owner], keys, encodings)
    return wanted


def _as_used(recall: Recall, chunk: Chunk, keys: set[bytes], encodings: Sequence[Encoding]) -> Wanted:
    each = {
        encoding: recall.identity(encoding, chunk.token_ids) for encoding in (Encoding.STANDALONE, Encoding.PREFIXED)
    }
    seen = [encoding for encoding, identity in each.items() if identity.key() in keys]
    return {each[encoding]: (chunk.chunk_id, 1) for encoding in seen or encodings}


def warm(
    index: Index, recall: Recall, wanted: Wanted, on_progress: Callable[[Warming], None] = lambda done: None
) -> Warming:
    """Make what is missing of it, a batch at a time; a run that was stopped goes on where it was."""
    report = Warming(wanted=len(wanted))
    index.open_budget()
    stored = index.store.has_many(wanted)
    missing = {identity: of for identity, of in wanted.items() if identity not in stored}
    report.present = len(wanted) - len(missing)
    on_progress(report)
    order = _within(index, _expected(index, missing)) if missing else []
    encoded = 0
    for batch in batches_of(order):
        started = time.perf_counter()
        encoded += sum(len(identity.chunk_ids) for identity in batch)
        made = encode_identities(index.model, batch, recall.prefix)
        report.seconds += time.perf_counter() - started
        kept = index.store.put_many((identity, kv, missing[identity][0]) for identity, kv in made.items())
        report.made += len(kept)
        report.tokens += sum(kv.tokens for identity, kv in made.items() if identity.key() in kept)
        report.bytes += sum(kv.nbytes for identity, kv in made.items() if identity.key() in kept)
        on_progress(report)
        if not kept:
            break  # what comes now is worth less still
    report.refused = len(missing) - report.made
    if report.tokens:
        index.store.record_uses({}, seconds_per_token=report.seconds / encoded)
    return report


def _expected(index: Index, missing: Mapping[KVIdentity, tuple[str, int]]) -> list[KVIdentity]:
    """Record the uses that are expected, unless there is a record of uses already; in the order of worth, most first.

    Those that are wanted as often stay in the order in which they were named.
    """
    known = {key: row.weight for key, row in index.store.uses_of([identity.key() for identity in missing]).items()}
    new = {
        identity.key(): Use(
            tokens=len(identity.chunk_ids),
            nbytes=index.shape.nbytes(len(identity.chunk_ids)),
            owner=digest(owner),
            wanted=times,
        )
        for identity, (owner, times) in missing.items()
        if identity.key() not in known
    }
    if new:
        index.store.record_uses(new)
    rows = index.store.uses_of([identity.key() for identity in missing])
    return sorted(missing, key=lambda identity: -rows[identity.key()].weight)


def _within(index: Index, order: Sequence[KVIdentity]) -> list[KVIdentity]:
    """As many of the first as the whole budget could hold."""
    budget = index.store.budget
    if budget is None:
        return list(order)
    ends = accumulate(index.shape.nbytes(len(identity.chunk_ids)) for identity in order)
    return [identity for identity, end in zip(order, ends, strict=True) if end <= budget]
