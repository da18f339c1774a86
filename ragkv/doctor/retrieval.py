"""How well an index finds: recall and MRR of every mode of retrieval, where a file of questions names gold passages.

A question of the file is relevant to chunks by `"sources"` (or `"source"`, `"document"`, `"documents"`), which names
documents, and by `"evidence"`, a passage of theirs:

1. with documents and a text (the evidence, else the answers): the chunks of these documents that contain the text, or
   all chunks of these documents if none does, because an answer may be worded differently;
2. with documents only: all their chunks;
3. with a text only: the chunks of the whole index that contain it.

Case, white space and punctuation make no difference.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ragkv.config import MODES, NONE, Mode
from ragkv.doctor.io import FileRow, normal, question_of, rows
from ragkv.doctor.metrics import MetricValue, RetrievalQuestion, RetrievalTask, Search, measure
from ragkv.errors import ConfigError, RetrievalError, UsageError
from ragkv.index.index import served, why_not_served
from ragkv.retrievers import ScoreKind

if TYPE_CHECKING:
    from ragkv.pipeline import RagKV
    from ragkv.store import Store

GOLD = ("sources", "source", "documents", "document", "evidence")
"""The keys by which a line of a file of questions names gold passages."""


def names_gold(path: Path) -> bool:
    """Whether a line of a file of questions names gold passages."""
    return any(row.values.get(key) for row in rows(path, "a JSONL file of questions") for key in GOLD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure. None means all modes, both with and without a reranker, and the index's candidates."""

    modes: Sequence[str] | None = None
    rerank: bool | None = None
    candidates: int | None = None

    def __post_init__(self) -> None:
        for mode in self.modes or ():
            if mode not in MODES:
                raise UsageError(f"--modes are any of {', '.join(MODES)}, not {mode!r}.")


def index_searches(rag: RagKV, settings: Settings) -> dict[str, Search]:
    """The searches of an index, by name."""
    modes = modes_of(settings.modes, rag.index.encoders.kinds, f"the index at {rag.folder}")
    variants = rerank_variants(settings.rerank, rag.config.reranker != NONE, "set `reranker` in the index's ragkv.toml")

    def search(mode: Mode, rerank: bool, question: str, k: int) -> list[str]:
        found = rag.retrieve(question, top_k=k, retrieval=mode, rerank=rerank, candidates=settings.candidates)
        return [each.chunk.chunk_id for each in found]

    return {search_name(mode, rerank): partial(search, mode, rerank) for mode in modes for rerank in variants}


DEPTHS = (1, 5, 10)
"""The values of k in recall@k."""


def measure_retrieval(rag: RagKV, task: RetrievalTask, *, seed: int) -> list[MetricValue]:
    """Recall@k and MRR of every mode that the index serves, with and without its reranker."""
    rows = measure(task, index_searches(rag, Settings()), DEPTHS, seed=seed)
    wanted = [*(f"recall@{k}" for k in DEPTHS), f"mrr@{DEPTHS[-1]}"]
    return [row for row in rows if row.metric in wanted]


def search_name(mode: Mode, rerank: bool) -> str:
    return f"{mode}+rerank" if rerank else mode


def modes_of(wanted: Sequence[str] | None, kinds: Collection[ScoreKind], what: str) -> list[Mode]:
    """The wanted modes. Raises RetrievalError for a mode that needs other vectors than `kinds`."""
    for mode in wanted or ():
        if why := why_not_served(cast("Mode", mode), kinds, f"{what[0].upper()}{what[1:]}"):
            raise RetrievalError(why)
    return [mode for mode in served(kinds) if wanted is None or mode in wanted]


def rerank_variants(wanted: bool | None, there: bool, remedy: str) -> list[bool]:
    if wanted and not there:
        raise RetrievalError(f"--rerank needs a reranker: {remedy}.")
    return [wanted] if wanted is not None else [False, True] if there else [False]


_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_PUNCTUATION = re.compile(r"(?<!\d)[.,:]|[.,:](?!\d)|[^\w\s.,:#%&@+$€£°=<>*/\\]|_")
"""Punctuation to ignore, except where it has a meaning: in numbers (3.5, 10:30), and in names such as C#."""


@dataclass(frozen=True, slots=True)
class Wording:
    """A text in three readings, of which one must match. `plain` only ignores case and white space.

    In `apart` punctuation separates words, in `joined` it does not: of `Oskel's well-known "U.S." mill` they are
    `oskel s well known u s mill` and `oskels wellknown us mill`.
    """

    plain: str
    apart: str
    joined: str

    @classmethod
    def of(cls, text: str) -> Wording:
        plain = normal(text)
        bare = _THOUSANDS.sub("", plain)
        return cls(plain, *(" ".join(_PUNCTUATION.sub(sign, bare).split()) for sign in (" ", "")))

    def holds(self, wanted: Wording) -> bool:
        """Whether `wanted` occurs in this text. If it is all punctuation, it must occur as it is."""
        if not wanted.joined:
            return wanted.plain in self.plain
        return wanted.plain in self.plain or wanted.apart in self.apart or wanted.joined in self.joined


_DOCUMENTS = GOLD[:4]


def judged_questions(path: Path, store: Store) -> RetrievalTask:
    """The questions of a file with their relevant chunks in `store`.

    A question is unjudged if it names a document that is not in the index, or a text that no chunk contains. Raises
    ConfigError, which names file and line, and RetrievalError if no question has a relevant chunk.
    """
    lines = list(rows(path, "a JSONL file of questions"))
    if not lines:
        raise ConfigError(f'{path} holds no question; write one JSON object per line: {{"question": "…"}}.')
    chunks = _Chunks(store)
    judgements, unjudged, whole = [], [], 0
    for number, row in enumerate(lines, start=1):
        question = question_of(row)
        documents, evidence = _texts(row, _DOCUMENTS), _texts(row, ("evidence",))
        texts = question.answers if row.values.get("evidence") is None else evidence
        name = row.name("id") if "id" in row.values else str(number)
        relevant = among = chunks.of_documents(documents, row.where) if documents else None
        if texts and among != []:
            relevant = chunks.holding(texts, among)
            if not relevant and among is not None:
                relevant, whole = among, whole + 1
        if relevant:
            judgements.append(
                RetrievalQuestion(question_id=name, question=question.text, relevant=dict.fromkeys(relevant, 1.0))
            )
        else:
            unjudged.append(name)
    if not judgements:
        raise RetrievalError(
            f"No chunk of the index is relevant to any question of {path}; ingest the documents that it asks about, "
            'and name them ("sources") or give an "answer" in their words.'
        )
    notes = [f"{whole} questions judged by document alone: no chunk of it holds the answer"] if whole else []
    return RetrievalTask(name=path.stem, judgements=judgements, unjudged=unjudged, notes=notes)


def _texts(row: FileRow, keys: Sequence[str]) -> tuple[str, ...]:
    """The text or list of texts under one of `keys`. No text may be empty."""
    present = [key for key in keys if row.values.get(key) is not None]
    if len(present) > 1:
        raise ConfigError(f'{row.where}: give "{present[0]}" or "{present[1]}", not both.')
    found: Any = row.values[present[0]] if present else []
    texts = [found] if isinstance(found, str) else found
    if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
        raise ConfigError(f'{row.where}: "{present[0]}" is a text or a list of texts, none of them empty.')
    return tuple(texts)


class _Chunks:
    """The index's chunks, with normalised texts, by document and name."""

    def __init__(self, store: Store) -> None:
        self._texts: dict[str, Wording] = {}
        self._by_document: dict[str, list[str]] = {}
        self._named: dict[str, set[str]] = {}
        for stored in store.documents():
            document = stored.document
            for name in (document.document_id, document.source):
                self._named.setdefault(name, set()).add(document.document_id)
        for chunk in store.chunks():
            self._texts[chunk.chunk_id] = Wording.of(chunk.text)
            self._by_document.setdefault(chunk.document_id, []).append(chunk.chunk_id)

    def of_documents(self, names: Sequence[str], where: str) -> list[str]:
        return [chunk for name in names for chunk in self._by_document.get(self._document(name, where), ())]

    def _document(self, name: str, where: str) -> str:
        """The id of the document with this id, source, or end of a path (in whole parts); "" if there is none."""
        ids = self._named.get(name) or set().union(
            *(found for known, found in self._named.items() if known.endswith("/" + name.removeprefix("./")))
        )
        if len(ids) > 1:
            raise ConfigError(f"{where}: the index has {len(ids)} documents {name!r}; give more of the path.")
        return next(iter(ids), "")

    def holding(self, texts: Sequence[str], among: Iterable[str] | None) -> list[str]:
        wanted = [Wording.of(text) for text in texts]
        candidates = self._texts if among is None else {chunk: self._texts[chunk] for chunk in among}
        return [chunk for chunk, text in candidates.items() if any(text.holds(each) for each in wanted)]
