"""The server's own API below `/api`: questions, documents, chunks, uploads and ingest jobs.

Unlike OpenAI's protocol, an answer here has the scores of every retrieval stage and, for PCED, the expert that won each
token. Jobs ingest uploaded files (multipart forms, RFC 7578).
Citations give the source of each sentence of an answer. It is found by the words that sentence and source share, so it
works in the same way for every engine.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from math import log
from types import MappingProxyType
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Query, Request
from fastapi import Path as PathParameter
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from ragkv.config import History
from ragkv.errors import NothingFoundError, StoreBusyError, StoreFullError
from ragkv.index.answer import AnswerStream
from ragkv.index.batch import AsyncAnswerStream
from ragkv.index.snippets import is_refusal, refuses, sentences
from ragkv.ingest import ParseLimits
from ragkv.pipeline import RagKV
from ragkv.retrievers.bm25 import tokenise
from ragkv.server.errors import ApiError, Json, event
from ragkv.server.jobs import MAX_UPLOAD_FILES, IngestJob, JobManager, JobStatus
from ragkv.server.local import question_warnings
from ragkv.server.metrics import ConcurrencyLimiter
from ragkv.server.middleware import LocalRequest, error_body
from ragkv.server.schemas import (
    EVENTS,
    AnswerCitation,
    AnswerReply,
    ChunkPage,
    ConversationOptions,
    DocumentListing,
    DocumentText,
    FailFastList,
    IndexFacts,
    IndexListing,
    NewIndex,
    QueryCheck,
    QuestionOptions,
    SearchReply,
    ServedIndexes,
    ShownChunk,
    all_facts,
    chunk_urls,
    document_facts,
    document_page,
    index_facts,
    question_fields,
)
from ragkv.server.streaming import (
    AnswerResponse,
    ThoughtDeltas,
    TrimmedText,
    in_conversation,
    unless_gone,
    with_comments,
)
from ragkv.types import Answer, Source
from ragkv.util.display import one_line
from ragkv.util.files import FULL


class QueryFormatter:
    """The events `query`, `sources`, `token`, and `done` or `error`; or the object of `done` alone.

    `warnings`, if any, come first, and are in the object. A `local` request gets the tokens with the white space at
    both ends, and errors in the words of the command line.
    """

    names: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self, asked: QueryRequest, url_of: Callable[[Source], str], warnings: list[str], local: LocalRequest | None
    ) -> None:
        self._asked = asked
        self._question = asked.question.strip()
        self._url = url_of
        self._warnings = warnings
        self._local = local
        self._trimmed, self._thoughts = TrimmedText(), ThoughtDeltas()
        self._found = False
        self._sent = self._queries = 0

    def whole(self, answer: Answer, stream: AsyncAnswerStream) -> dict[str, Any]:
        payload = {**answer.to_json(), "question": self._question, "sources": self._sources(answer.sources)}
        if self._asked.trace:
            payload["trace"] = {"tokens": [token.to_json() for token in stream.trace]}
        if self._asked.citations:
            payload["citations"] = [citation.model_dump() for citation in cited(self._question, answer)]
            payload["refused"] = is_refusal(answer.text)
        if self._warnings:
            payload["warnings"] = self._warnings
        return payload

    def on_start(self) -> Iterator[bytes]:
        if self._warnings:
            yield event({"warnings": self._warnings}, "warnings")

    def on_text(self, delta: str, stream: AsyncAnswerStream) -> Iterator[bytes]:
        if not self._found:
            sources = self._sources(stream.sources)  # read first: when there are some, all queries are written
            for query in stream.queries[self._queries :]:
                self._queries += 1
                yield event({"text": query}, "query")
            self._found = bool(sources)
            if sources:
                # the same at any time: how many tokens each source won is only known at the end
                yield event({"sources": [{**each, "tokens_won": None} for each in sources]}, "sources")
        if more := self._thoughts.take(stream):
            yield event({"text": more}, "reasoning")
        yield from self._tokens(stream)

    def on_end(self, answer: Answer, stream: AsyncAnswerStream) -> Iterator[bytes]:
        yield from self._tokens(stream)
        yield event(self.whole(answer, stream), "done")

    def on_nothing(self, error: NothingFoundError, stream: AsyncAnswerStream) -> Answer:
        raise error

    def on_error(self, refusal: ApiError) -> Iterator[bytes]:
        yield event(error_body(refusal, self._local), "error")

    def _tokens(self, stream: AsyncAnswerStream) -> Iterator[bytes]:
        """The tokens that were not sent yet; their texts together are the answer."""
        trace = stream.trace
        while self._sent < len(trace):
            token = trace[self._sent]
            self._sent += 1
            if shown := token.text if self._local else self._trimmed.take(token.text):
                yield event({"text": shown, "source": token.source}, "token")

    def _sources(self, sources: tuple[Source, ...]) -> list[dict[str, Any]]:
        return [{**source.to_json(), "url": self._url(source)} for source in sources]


MAX_LISTED_ROWS = 1000
Limit = Annotated[int, Query(ge=1, le=MAX_LISTED_ROWS)]


class TurnRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    question: str
    answer: str


@question_fields("search")
class SearchRequest(QuestionOptions):
    """A question to search for; a field that is left out or null is as in `ragkv.toml`."""

    model_config = ConfigDict(extra="forbid")
    question: str


class SampleQuestions(BaseModel):
    questions: list[str]


@question_fields()
class QueryRequest(ConversationOptions):
    """A question. `history`: the turns before it, used according to `history_mode`, with at most `history_tokens` of
    them in the prompt; `trace`: report the expert that won each token; `citations`: report the sources of each
    sentence; `warnings`: report warnings about the engine and the model.
    """

    model_config = ConfigDict(extra="forbid")
    question: str
    history: FailFastList[TurnRequest] = Field(default=[], max_length=4096)
    history_mode: History | None = None
    history_tokens: int = Field(default=512, ge=0)
    trace: bool = False
    citations: bool = False
    warnings: bool = False
    stream: bool = False


def query_routes(served: ServedIndexes, limiter: ConcurrencyLimiter) -> APIRouter:
    """The routes that answer questions about these indexes and read them."""
    routes = APIRouter(prefix="/api", tags=["ragkv's own"])

    async def prepared(rag: RagKV, body: QueryRequest) -> tuple[AnswerStream, list[str]]:
        return await asyncio.get_running_loop().run_in_executor(limiter.asks, _prepared, rag, body)

    @routes.get("/indexes", response_model=IndexListing)
    def indexes() -> Json:
        """The indexes, and what may be asked of each."""
        return Json({"indexes": all_facts(served.available())})

    @routes.post("/indexes/{name}/query", response_model=AnswerReply, responses=EVENTS)
    async def query(name: str, body: QueryRequest, request: Request) -> Response:
        """Answer a question as `ragkv query` does. Streamed: events `query` (each that the model writes), `sources`,
        `token`, then `done` or `error`.
        """
        rag, local = served.index(name), LocalRequest.of(request)
        stream, warnings = await prepared(rag, body)
        formatter = QueryFormatter(body, chunk_urls(request, name), warnings, local)
        tracker = await limiter.admit(name)
        answering = AsyncAnswerStream(rag.index, lambda: stream, announce=body.stream)
        response = AnswerResponse(answering, tracker, formatter)
        if local is not None:
            local.answer = response
        return await response.begin(request, streamed=body.stream, at_once=local is not None)

    @routes.post("/indexes/{name}/query/check", response_model=QueryCheck)
    async def check(name: str, body: QueryRequest) -> Json:
        """Check a question and its settings without answering it; with `warnings`, what to know before the answer."""
        rag = served.index(name)
        _, warnings = await prepared(rag, body)
        return Json({"engine": body.option("engine") or rag.config.default_engine, "warnings": warnings})

    @routes.post("/indexes/{name}/search", response_model=SearchReply)
    async def search(name: str, body: SearchRequest, request: Request) -> Json:
        """The chunks that a question would be answered from, best first."""
        rag, url_of = served.index(name), chunk_urls(request, name)
        tracker = await limiter.admit(name)
        try:
            searching = asyncio.get_running_loop().run_in_executor(limiter.vectors, _searched, rag, body)
            found = await unless_gone(request, tracker, searching)
        finally:
            tracker.leave()
        return Json({"chunks": [{**each.to_json(), "url": url_of(each)} for each in found]})

    @routes.get("/indexes/{name}/samples", response_model=SampleQuestions)
    def samples(name: str) -> Json:
        """Questions to begin with, made from the documents; none where nothing suits."""
        return Json({"questions": served.index(name).sample_questions()})

    @routes.get("/indexes/{name}/documents", response_model=DocumentListing)
    def documents(
        index: Annotated[str, PathParameter(alias="name")],
        limit: Limit = 100,
        after: str = "",
        pattern: Annotated[str, Query(alias="name", max_length=500)] = "",
        where: Annotated[FailFastList[str], Query()] = [],  # noqa: B006 - FastAPI copies it
    ) -> Json:
        """The documents in the order of their ids; `name` is a part of their source's name, or a pattern (`*.md`)."""
        return Json(document_page(served.index(index), pattern, where, after=after, limit=limit))

    # an id is usually a path: its slashes are percent-encoded, unlike those of the route
    @routes.get("/indexes/{name}/documents/{document_id:path}/chunks", response_model=ChunkPage)
    def chunks(
        name: str,
        document_id: str,
        request: Request,
        limit: Limit = 100,
        after: Annotated[int, Query(ge=-1, lt=1 << 53)] = -1,
    ) -> Json:
        """A document's chunks in order, those behind the ordinal `after`."""
        rag = served.index(name)
        # the id itself may end in an encoded "/chunks"
        if not request.scope.get("raw_path", b"/chunks").endswith(b"/chunks"):
            return _document(rag, f"{document_id}/chunks")
        return Json(_chunk_page(rag, document_id, after, limit))

    @routes.get("/indexes/{name}/documents/{document_id:path}", response_model=DocumentText)
    def document(name: str, document_id: str) -> Json:
        """One document."""
        return _document(served.index(name), document_id)

    @routes.get("/indexes/{name}/chunks/{chunk_id:path}", response_model=ShownChunk)
    def chunk(name: str, chunk_id: str) -> Json:
        """One chunk, as sources link to it."""
        found = served.index(name).store.chunk(chunk_id)
        if found is None:
            raise ApiError(404, "There is no such chunk; its document may have changed.", code="not_found")
        return Json(ShownChunk.of(found).model_dump())

    return routes


def _prepared(rag: RagKV, body: QueryRequest) -> tuple[AnswerStream, list[str]]:
    """The answer, not started, and the requested warnings; slow for a long history."""
    turns = [(turn.question, turn.answer) for turn in body.history]
    words = in_conversation(
        rag,
        body.question.strip(),
        turns,
        history=body.history_mode,
        history_tokens=body.history_tokens,
        rewrite=body.rewrite,
    )
    stream = rag.stream(words.prompt, **body.query_options(words))
    return stream, question_warnings(rag, stream) if body.warnings else []


def _searched(rag: RagKV, body: SearchRequest) -> tuple[Source, ...]:
    return rag.sources(body.question, rag.retrieve(body.question, **body.arguments()))


def _document(rag: RagKV, document_id: str) -> Json:
    found = document_facts(rag, document_id)
    if found is None:
        raise _no_document()
    return Json(found)


def _chunk_page(rag: RagKV, document_id: str, after: int, limit: int) -> dict[str, object]:
    if rag.store.document(document_id) is None:
        raise _no_document()
    found = list(islice(rag.store.chunks(document_id), after + 1, after + 2 + limit))
    shown = [ShownChunk.of(chunk).model_dump() for chunk in found[:limit]]
    return {"chunks": shown, "next": after + limit if len(found) > limit else None}


def _no_document() -> ApiError:
    return ApiError(404, "There is no such document.", code="not_found")


_LOOK_SECONDS = 0.1
"""How often a job is looked at for the events of its progress."""
_MAX_NAME_CHARS = 255
_DRIVE = re.compile(r"[A-Za-z]:")


class _Form(MultiPartParser):
    """Starlette's parser, but for a form that ends early, which that one takes for a shorter one."""

    def __init__(self, request: Request) -> None:
        super().__init__(request.headers, self._whole(request), max_files=MAX_UPLOAD_FILES, max_fields=1)
        self._complete = False

    def on_end(self) -> None:
        self._complete = True

    async def _whole(self, request: Request) -> AsyncGenerator[bytes]:
        async for data in request.stream():
            yield data
        if not self._complete:
            raise MultiPartException("it ends early.")


async def receive_files(request: Request, *, most_bytes: int) -> list[UploadFile]:
    """The form's files, all of them parts called `files`.

    ApiError for a form that is damaged, for more than `MAX_UPLOAD_FILES` files, for one of more than `most_bytes`, and
    for names that are paths.
    """
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise ApiError(415, "Send the files as multipart/form-data.", code="unsupported_media_type")
    try:
        form = await _Form(request).parse()
    except MultiPartException as error:
        raise ApiError(
            400, f"The form is not well-formed multipart/form-data: {error.message}", param="files"
        ) from error
    except ClientDisconnect as error:
        raise ApiError(499, "The client went away.", code="client_closed_request") from error
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise StoreFullError("The server's temporary folder is full: make room there, or set TMPDIR.") from error
    try:
        _require_files(form, most_bytes)
    except BaseException:
        await form.close()
        raise
    return [value for _, value in form.multi_items() if isinstance(value, UploadFile)]


def _require_files(form: FormData, most_bytes: int) -> None:
    """ApiError unless these are files of sound names and sizes."""
    if not form:
        raise ApiError(400, "The form holds no file; send some as parts called `files`.", param="files")
    names = set[str]()
    for field, value in form.multi_items():
        if field != "files" or not isinstance(value, UploadFile):
            raise ApiError(400, "Send each file as a part called `files`, with its name.", param="files")
        name = value.filename or ""
        strange = one_line(name) != name or "\\" in name or _DRIVE.match(name) or len(name) > _MAX_NAME_CHARS
        if strange or any(part.strip() in ("", ".", "..") for part in name.split("/")):
            message = (
                f"A file may be called `report.pdf` or `notes/report.pdf`, in at most {_MAX_NAME_CHARS} printable "
                f"characters, not {name[:80]!r}."
            )
            raise ApiError(400, message, param="files")
        if name in names:
            raise ApiError(400, f"Two of the files are called {name!r}.", param="files")
        if (value.size or 0) > most_bytes:
            message = f"{name!r} has more than {most_bytes} bytes, the most that the index reads."
            raise ApiError(413, message, param="files", code="too_large")
        names.add(name)


_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {"files": {"type": "array", "items": {"type": "string", "format": "binary"}}},
                    "required": ["files"],
                }
            }
        },
    }
}
_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Events `progress`, then `done`, `failed`, `cancelled` or `interrupted`; each has the job.",
        "content": {"text/event-stream": {}},
    }
}


class JobReply(BaseModel):
    job: JobStatus


class JobListing(BaseModel):
    """The latest first."""

    jobs: list[JobStatus]


class Deletion(BaseModel):
    deleted: str


def document_routes(served: ServedIndexes, manager: JobManager) -> APIRouter:
    """The routes that change these indexes."""
    routes = APIRouter(prefix="/api", tags=["ragkv's own"])

    @routes.post("/indexes", status_code=201, response_model=IndexFacts)
    def create(body: NewIndex) -> Json:
        """Make an empty index in a folder beside that of the index `like`, with its settings and its model."""
        return Json(index_facts(body.name, served.create(body.name, manager.writable(body.like))), 201)

    @routes.post("/indexes/{name}/documents", status_code=202, response_model=JobReply, openapi_extra=_FORM)
    async def upload(name: str, request: Request) -> Json:
        """Add files to the index, or replace those of the same names: a job ingests them."""
        queue = await asyncio.to_thread(manager.queue, name)
        with queue.place():
            most = ParseLimits.of(queue.rag.config.ingest).file
            job = queue.accept(await receive_files(request, most_bytes=most))
        return Json(_job_reply(job), 202, headers={"location": f"/api/indexes/{quote(name)}/jobs/{job.facts.id}"})

    @routes.delete("/indexes/{name}/documents/{document_id:path}", response_model=Deletion)
    def delete(name: str, document_id: str) -> Json:
        """Delete a document with all that only it needed. Answers on their way keep what they have."""
        rag = manager.writable(name)
        try:
            deleted = rag.delete(document_id, timeout=1, on_wait=lambda _: None)
        except StoreBusyError as error:
            message = "Documents are being added to the index: delete again when that has ended."
            raise ApiError(409, message, code="busy", headers={"retry-after": "10"}) from error
        if not deleted:
            raise ApiError(404, "There is no such document.", code="not_found")
        return Json({"deleted": document_id})

    @routes.get("/indexes/{name}/jobs", response_model=JobListing)
    def jobs(name: str) -> Json:
        """The ingest jobs, of those that have ended the last 32."""
        return Json({"jobs": [job.facts.to_json() for job in manager.jobs(name)]})

    @routes.get("/indexes/{name}/jobs/{job_id}", response_model=JobReply)
    def job(name: str, job_id: str) -> Json:
        """One job."""
        return Json(_job_reply(manager.queue(name).job(job_id)))

    @routes.get("/indexes/{name}/jobs/{job_id}/events", response_class=Response, responses=_EVENTS)
    def events(name: str, job_id: str) -> Response:
        """A job's progress and its end, as server-sent events."""
        events = with_comments(_events(manager.queue(name).job(job_id)))
        return StreamingResponse(events, media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    @routes.delete("/indexes/{name}/jobs/{job_id}", response_model=JobReply)
    def cancel(name: str, job_id: str) -> Json:
        """End a job; what it has committed stays. The one that runs ends between two batches of its work."""
        return Json(_job_reply(manager.queue(name).cancel(job_id)))

    return routes


def _job_reply(job: IngestJob) -> dict[str, Any]:
    return {"job": job.facts.to_json()}


async def _events(job: IngestJob) -> AsyncGenerator[bytes]:
    """The job's state each time it has changed, until it has ended."""
    last: dict[str, Any] | None = None
    while last is None or last["ended"] is None:
        if (state := job.facts.to_json()) != last:
            last = state
            yield event({"job": state}, "progress" if state["ended"] is None else state["state"])
        else:
            await asyncio.sleep(_LOOK_SECONDS)


_MAX_CITED_SOURCES = 3
_SUPPORTED = 0.5
"""A sentence is cited if its sources contain this share of its words' weight."""
_ADDED = 0.2
"""A source is cited if it contains at least this share that earlier sources do not."""
_ORDINARY = 0.25
"""The factor for words with at most three letters and for the question's own words."""
_MAX_CITED_CHARS = 20_000  # characters of an answer; a longer one is not cited
_MAX_SENTENCES = 500
_MAX_READ = 32, 200_000  # sources, and their characters; later ones are ignored


def cited(question: str, answer: Answer) -> list[AnswerCitation]:
    """The sentences of an answer whose words its sources contain.

    A word that fewer sources contain weighs more. Fenced code and refusals are not cited. Neighbours on one line with
    the same sources are one citation.
    """
    citations: list[AnswerCitation] = []
    if len(answer.text) > _MAX_CITED_CHARS or not answer.sources:
        return citations
    weights = _WordWeights(question, [source.text for source in answer.sources])
    for start, end, *_ in islice(sentences(answer.text), _MAX_SENTENCES):
        if refuses(answer.text[start:end]):
            continue
        if not (places := weights.sources(answer.text[start:end])):
            continue
        if citations and citations[-1].sources == places and not answer.text[citations[-1].end : start].strip(" \t"):
            start = citations.pop().start
        citations.append(AnswerCitation(start=start, end=end, sources=places))
    return citations


class _WordWeights:
    """The words of the sources, with their weights."""

    def __init__(self, question: str, sources: Sequence[str]) -> None:
        most, characters = _MAX_READ
        sizes = accumulate(map(len, sources[:most]))
        self._sources = [
            frozenset(tokenise(text)) for text, size in zip(sources, sizes, strict=False) if size <= characters
        ]
        self._question = frozenset(tokenise(question))

    def sources(self, sentence: str) -> tuple[int, ...]:
        """The indices of the sources that support a sentence; none if too many of its words are in no source."""
        weights = {word: self._weight(word) for word in tokenise(sentence)}
        if not weights or not self._sources:
            return ()
        total = sum(weights.values())
        chosen: list[int] = []
        left = set(weights)
        while left and len(chosen) < _MAX_CITED_SOURCES:
            added = [sum(weights[word] for word in left & words) for words in self._sources]
            best = max(range(len(added)), key=lambda at: (added[at], len(self._sources[at] & self._question), -at))
            if added[best] < _ADDED * total:
                break
            chosen.append(best)
            left -= self._sources[best]
        held = total - sum(weights[word] for word in left)
        return tuple(chosen) if chosen and held >= _SUPPORTED * total else ()

    def _weight(self, word: str) -> float:
        having = sum(word in words for words in self._sources)
        rarity = log(1 + len(self._sources) / max(having, 0.5)) ** 2
        ordinary = word in self._question or (len(word) <= 3 and word.isalpha() and word.isascii())
        return rarity * (_ORDINARY if ordinary else 1.0)
