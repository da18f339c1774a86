"""Find the chunks of the user's index that answer the user's questions.

The file of questions is the one that `ragkv doctor` and `ragkv tune` read, with further keys: `"sources"` (or
`"source"`, `"document"`, `"documents"`) names documents, `"evidence"` is a passage of theirs. The relevant chunks are:

1. with documents and a text (the evidence, else the answers): the chunks of these documents that contain the text, or
   all chunks of these documents if none does, because an answer may be worded differently;
2. with documents only: all their chunks;
3. with a text only: the chunks of the whole index that contain it.

Case, white space and punctuation make no difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragkv.errors import ConfigError, RetrievalError
from ragkv.evaluation.containment import Wording
from ragkv.evaluation.filerow import Row, rows
from ragkv.evaluation.judgement import Judgement, Task
from ragkv.evaluation.question import question_of
from ragkv.store import Store

__all__ = ["judged_questions"]

_NAMES = ("sources", "source", "documents", "document")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """A line of the file: the question, and the documents and texts that identify its chunks."""

    question_id: str
    question: str
    documents: tuple[str, ...]
    texts: tuple[str, ...]
    where: str


def judged_questions(path: Path, store: Store) -> Task:
    """The questions of a file with their relevant chunks in `store`.

    A question is unjudged if it names a document that is not in the index, or a text that no chunk contains. Raises
    ConfigError, which names file and line, and RetrievalError if no question has a relevant chunk.
    """
    wanted = [_parse(row, number) for number, row in enumerate(rows(path, "a JSONL file of questions"), start=1)]
    if not wanted:
        raise ConfigError(f'{path} holds no question; write one JSON object per line: {{"question": "…"}}.')
    chunks = _Chunks(store)
    judgements, unjudged, whole = [], [], 0
    for line in wanted:
        relevant = among = chunks.of_documents(line) if line.documents else None
        if line.texts and among != []:
            relevant = chunks.holding(line.texts, among)
            if not relevant and among is not None:
                relevant, whole = among, whole + 1
        if relevant:
            judgements.append(
                Judgement(question_id=line.question_id, question=line.question, relevant=dict.fromkeys(relevant, 1.0))
            )
        else:
            unjudged.append(line.question_id)
    if not judgements:
        raise RetrievalError(
            f"No chunk of the index is relevant to any question of {path}; ingest the documents that it asks about, "
            'and name them ("sources") or give an "answer" in their words.'
        )
    notes = [f"{whole} questions judged by document alone: no chunk of it holds the answer"] if whole else []
    return Task(name=path.stem, judgements=judgements, unjudged=unjudged, notes=notes)


def _parse(row: Row, number: int) -> _Wanted:
    question = question_of(row)
    evidence = _texts(row, ("evidence",))
    return _Wanted(
        question_id=row.name("id") if "id" in row.values else str(number),
        question=question.text,
        documents=_texts(row, _NAMES),
        texts=evidence or question.answers,
        where=row.where,
    )


def _texts(row: Row, keys: Sequence[str]) -> tuple[str, ...]:
    """The text or list of texts under one of `keys`. No text may be empty."""
    given = [key for key in keys if row.values.get(key) is not None]
    if len(given) > 1:
        raise ConfigError(f'{row.where}: give "{given[0]}" or "{given[1]}", not both.')
    found: Any = row.values[given[0]] if given else []
    texts = [found] if isinstance(found, str) else found
    if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
        raise ConfigError(f'{row.where}: "{given[0]}" is a text or a list of texts, none of them empty.')
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

    def of_documents(self, line: _Wanted) -> list[str]:
        return [
            chunk for name in line.documents for chunk in self._by_document.get(self._document(name, line.where), ())
        ]

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
