"""Questions to begin with, for somebody who does not know the documents yet.

No model writes them: they are questions that the documents ask themselves, facts turned into questions (English only),
and headings. A question is kept if the search by words finds its own passage first, so that it has an answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import islice

from ragkv.store import Store
from ragkv.types import Chunk

_MAX_DOCUMENTS, _MAX_CHUNKS, _MAX_TRIES = 24, 8, 24
_SENTENCE = re.compile(r"[^.!?。！？\n]+[.!?。！？]+")
_QUESTION = re.compile(r"(?:¿|[^\W\d_])[^?？]{8,90}[?？]")
_PERSONAL = re.compile(r"\b(?:I|my|me|we|us|our|you|your|this|that|these|it|they|them|he|she|his|her)\b", re.IGNORECASE)
_SUBJECT = (
    r"(?P<the>The|An?) (?P<subject>(?!same|first|other|rest|next)[a-z][a-z'’-]*(?: (?!is|are|was|has)[a-z'’-]+){0,3}) "
)
_NUMBER = r"(?:about |only |around |exactly )?(?:[£$€]? ?\d|one|two|three|four|five|six|seven|eight|nine|ten|half)"
_FACTS = tuple(
    (re.compile(rf"{_SUBJECT}{verb}"), question)
    for verb, question in (
        (rf"costs {_NUMBER}", "How much does the {subject} cost?"),
        (rf"(?:takes|lasts) {_NUMBER}", "How long does the {subject} take?"),
        (rf"weighs {_NUMBER}", "How much does the {subject} weigh?"),
        (r"opens\b", "When does the {subject} open?"),
        (r"closes\b", "When does the {subject} close?"),
        (r"(?:starts|begins) (?:on|at|in)\b", "When does the {subject} start?"),
        (r"ends (?:on|at|in)\b", "When does the {subject} end?"),
        (r"leaves (?:on|at)\b", "When does the {subject} leave?"),
        (rf"(?:is|was) {_NUMBER}", "What is the {subject}?"),
    )
)
_NAMED = tuple(
    (re.compile(rf"^(?P<subject>(?:[A-Z][\w'’&-]+ ?){{1,4}}) {verb}"), question)
    for verb, question in (
        (r"was founded (?:in|on)\b", "When was {subject} founded?"),
        (r"was founded by\b", "Who founded {subject}?"),
        (rf"employs {_NUMBER}", "How many people does {subject} employ?"),
        (r"(?:is|was) based in\b", "Where is {subject} based?"),
    )
)


def sample_questions(store: Store, find: Callable[[str], str | None], count: int) -> list[str]:
    """Up to `count` questions, from as many documents as possible; `find` gives the id of the chunk that the search by
    words finds first. The same index has the same questions.
    """
    documents = [
        list(islice(store.chunks(stored.document.document_id), _MAX_CHUNKS))
        for stored in islice(store.documents(), _MAX_DOCUMENTS)
    ]
    chosen: dict[str, None] = {}
    tries = 0
    for make in (_facts, _headings):
        waiting = [make(chunks) for chunks in documents]
        while waiting and len(chosen) < count and tries < _MAX_TRIES:  # in turn, one of each document
            questions = waiting.pop(0)
            for question, chunk_id in questions:
                tries += 1
                if question not in chosen and find(question) == chunk_id:
                    chosen[question] = None
                    waiting.append(questions)
                    break
                if tries == _MAX_TRIES:
                    break
    return list(chosen)[:count]


def _facts(chunks: list[Chunk]) -> Iterator[tuple[str, str]]:
    """(question, chunk id): facts first, then what a document asks itself."""
    texts = [(_prose(chunk), chunk.chunk_id) for chunk in chunks]
    for text, chunk_id in texts:
        for sentence in map(str.strip, _SENTENCE.findall(text)):
            for pattern, question in (*_FACTS, *_NAMED):
                if fact := pattern.match(sentence):
                    yield question.format(subject=fact["subject"].strip()), chunk_id
    for text, chunk_id in texts:
        for sentence in map(str.strip, _SENTENCE.findall(text)):
            asks = _QUESTION.fullmatch(sentence)
            if asks and not _PERSONAL.search(sentence) and (len(sentence.split()) > 3 or not sentence.isascii()):
                yield sentence, chunk_id


def _prose(chunk: Chunk) -> str:
    """The text without headings and Markdown's marks, in one line."""
    headings = {name.strip() for name in (chunk.heading or "").split(" > ")}
    lines = (line.strip() for line in chunk.text.splitlines())
    text = " ".join(line for line in lines if not line.startswith(("#", "|")) and line not in headings)
    return " ".join(re.sub(r"[*_`>]+", " ", text).split())


def _headings(chunks: list[Chunk]) -> Iterator[tuple[str, str]]:
    for chunk in chunks:
        above, _, heading = (chunk.heading or "").rpartition(" > ")
        if above and len(heading) <= 60:
            yield f"What is said about “{heading}”?", chunk.chunk_id
