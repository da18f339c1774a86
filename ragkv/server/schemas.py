"""The types that several routes share: the fields of requests and responses, and the indexes that the server serves.

Each index has a name, which clients give as the model. The schemas are also those of the OpenAPI description.
"""

from __future__ import annotations

import copy
import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import quote

from fastapi import Request
from pydantic import BaseModel, ConfigDict, FailFast, Field, create_model

from ragkv.config import CONFIG_FILE, NONE
from ragkv.engines import engine_names, supported_engines
from ragkv.errors import RagkvError
from ragkv.index.filters import Pattern, composed, values_of
from ragkv.index.index import served
from ragkv.index.search import DocumentView, list_documents
from ragkv.question import question_arguments, question_options
from ragkv.server.errors import ApiError, stopping_error
from ragkv.server.streaming import ConversationText
from ragkv.store import DocumentStats
from ragkv.types import Answer, Chunk, Document, Source, TracedToken
from ragkv.util.options import OptionField, at_door
from ragkv.util.telemetry import note_span

if TYPE_CHECKING:
    from ragkv.pipeline import RagKV

logger = logging.getLogger(__name__)


M = TypeVar("M", bound=BaseModel)


def fields_of(owner: type[Any], *names: str, **json_names: str) -> Callable[[type[M]], type[M]]:
    """A decorator for a response's model: it adds the fields of a result's dataclass, all but those that the model has
    itself, or the named ones. `json_names` are their names in JSON, where they differ.
    """

    def extend(model: type[M]) -> type[M]:
        hints, added = get_type_hints(owner, include_extras=True), dict[str, Any]()
        for field in fields(owner):
            name = json_names.get(field.name, field.name)
            if name in model.model_fields or (names and field.name not in names):
                continue
            hint = hints[field.name]
            kind, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
            about = next(iter(notes), None)
            info: Any = Field(... if field.default is MISSING else field.default, description=about)
            if field.default_factory is not MISSING:
                info = Field(default_factory=field.default_factory, description=about)
            added[name] = (kind, info)
        return create_model(model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **added)

    return extend


@fields_of(Chunk, *(field.name for field in fields(Chunk) if field.name != "token_ids"))
class ShownChunk(BaseModel):
    """A chunk and its position: `start` and `end` are characters of the document's text."""

    @classmethod
    def of(cls, chunk: Chunk) -> Self:
        # not validated: a text of the store may hold half of a surrogate pair
        return cls.model_construct(**{name: getattr(chunk, name) for name in cls.model_fields})


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None
    request_id: str | None = Field(description="The id that is in the header `X-Request-Id` and in the server's log.")


class ErrorReply(BaseModel):
    """An error, in the shape of OpenAI's protocol."""

    error: ErrorBody


FAILURES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorReply, "description": "The request cannot be answered, and why."},
    "5XX": {"model": ErrorReply, "description": "The server or the index failed."},
}


class HealthReply(BaseModel):
    """Whether the server lives, or is ready."""

    status: str
    unavailable: int = Field(default=0, description="How many indexes are not where they were, and cannot be asked.")


EVENTS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer; with `stream`, as server-sent events.", "content": {"text/event-stream": {}}}
}


class IndexFacts(BaseModel):
    """An index: what it holds, and what may be asked of it."""

    name: str
    documents: int
    chunks: int
    model: str
    engines: list[str] = Field(description="Those that the model runs exactly.")
    default_engine: str
    top_k: int
    retrieval: list[str] = Field(description="The modes that the index can serve.")
    default_retrieval: str
    rerank: bool = Field(description="Whether candidates are reranked unless a question says otherwise.")
    reranker: bool = Field(description="Whether there is a reranker.")
    embedder: bool = Field(description="Whether there is an embedder.")
    writable: bool = Field(description="Whether documents can be added and deleted.")


class NewIndex(BaseModel):
    """An index to make, with the settings of the index `like`."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$", description="Also that of its folder.")
    like: str


class IndexListing(BaseModel):
    indexes: list[IndexFacts]


@fields_of(Source)
class AnswerSource(BaseModel):
    """A chunk behind an answer, with the scores of every stage that saw it."""

    url: str = Field(description="Where the chunk itself is found.")


@fields_of(TracedToken, token_id="id")
class TracedTokenReply(BaseModel):
    """One generated token; `source` is the place among `sources` of the chunk whose expert won it."""


class TraceReply(BaseModel):
    tokens: list[TracedTokenReply]


class AnswerCitation(BaseModel):
    """Characters `start` to `end` of the answer; `sources` are places among its sources, the best one first."""

    start: int
    end: int
    sources: Sequence[int]


@fields_of(Answer, text="answer", timing="timing_ms")
class AnswerReply(BaseModel):
    """What `ragkv query --json` prints, with an address for each source and, if asked for, trace and citations."""

    sources: list[AnswerSource]
    trace: TraceReply = Field(default=TraceReply(tokens=[]), description="Only with `trace`.")
    citations: list[AnswerCitation] = Field(default=[], description="Only with `citations`.")
    refused: bool = Field(
        default=False,
        description="Only with `citations`: whether the answer is that the documents do not say it (in English).",
    )
    warnings: list[str] = Field(default=[], description="Only with `warnings`, and if there are any.")


class QueryCheck(BaseModel):
    """The engine that would answer, and, if asked for, what to know before its answer."""

    engine: str
    warnings: list[str]


class SearchReply(BaseModel):
    """The chunks that were found, best first."""

    chunks: list[AnswerSource]


@fields_of(Document, "document_id", "source", "title", "media_type", "metadata")
class ListedDocument(BaseModel):
    """A document of the index."""

    chunks: int

    @classmethod
    def of(cls, view: DocumentView) -> Self:
        # not validated: a name may hold half of a surrogate pair
        return cls.model_construct(**{name: _facts(view)[name] for name in cls.model_fields})


@fields_of(DocumentStats, "tokens", "text_bytes", "kv_records", "kv_bytes", "vector_bytes")
class DocumentFacts(ListedDocument):
    """A document and the sizes of what is stored for it."""

    name: str = Field(description="The last part of `source`.")
    kv_bytes_own: int = Field(description="Of the KV that no other document shares.")
    ingested_at: float = Field(description="Seconds since 1970.")


class DocumentListing(BaseModel):
    """Documents in the order of their ids. `next`: list again with it as `after`; null on the last page. `total`: of
    the whole index.
    """

    documents: list[DocumentFacts]
    next: str | None
    total: int


class DocumentText(DocumentFacts):
    characters: int = Field(description="The length of its text.")


class ChunkPage(BaseModel):
    """Chunks in the order of the document. `next`: ask again with it as `after`; null on the last page."""

    chunks: list[ShownChunk]
    next: int | None


class FirstError(FailFast):
    """pydantic's mark, which Python 3.11 can put into a union."""

    __hash__ = object.__hash__


T = TypeVar("T")
FailFastList = Annotated[list[T], FirstError()]
"""A list that is refused at its first invalid item. A body may contain a million items, and collecting an error for
each takes seconds, in which the server answers no one."""


def question_fields(door: str = "http", *, without: Sequence[str] = ()) -> Callable[[type[M]], type[M]]:
    """A decorator for a request's model: it adds a field for each option of a question that the door shows.

    A field that is left out or null is as in `ragkv.toml`. `without` are those that the protocol names differently.
    """

    def extend(model: type[M]) -> type[M]:
        added: dict[str, Any] = {}
        for field in at_door(question_options(), door):
            if field.name not in without:
                attribute, shown = _attribute(field.name), field_schema(field)
                info: Any = Field(None, alias=field.name, description=field.option.help, json_schema_extra=shown)
                added[attribute] = (field_type(field) | None, info)
        return create_model(model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **added)

    return extend


def field_type(field: OptionField) -> Any:
    """The type of an option in JSON: a list may be one text, a JSON object may be its text."""
    if field.is_list:
        return str | FailFastList[str]
    return dict[str, Any] | str if field.option.is_json else field.type


def field_schema(field: OptionField) -> dict[str, Any]:
    """An option's bounds and choices, for descriptions; `Question` checks them, so that its errors are those of any
    other door."""
    least, most, choices = field.option.least, field.option.most, field.option.choices
    bounds = {"minimum": least, "maximum": most, "enum": [*choices, None] if choices else None}
    return {name: value for name, value in bounds.items() if value is not None}


def _attribute(name: str) -> str:
    """The attribute of a field: pydantic's models have one called `schema` themselves."""
    return f"json_{name}" if hasattr(BaseModel, name) else name


class QuestionOptions(BaseModel):
    """How a question is searched for and answered. `question_fields` adds the options."""

    def option(self, name: str) -> Any:
        """The value of an option; None if it is unset."""
        return getattr(self, _attribute(name), None)

    def arguments(self, **own: Any) -> dict[str, Any]:
        """The arguments of `Question`; `own` are those that the protocol names differently."""
        values = {name: self.option(name) for name in question_options()} | own
        if values["seed"] == -1:  # as in vLLM and llama.cpp: none
            values["seed"] = None
        for name, field in question_options().items():
            if field.is_list and isinstance(values[name], str):
                values[name] = [values[name]]
        return question_arguments(values)


class ConversationOptions(QuestionOptions):
    """A question that may follow others."""

    rewrite: bool | None = Field(
        default=None, description="Whether the model rewrites a follow-up question for the search."
    )

    def query_options(self, words: ConversationText, **own: Any) -> dict[str, Any]:
        """The options of `RagKV.stream`, which checks them."""
        texts = {"search_for": words.search, "rewrite": words.rewrite, "message": words.message}
        return {**self.arguments(**own), **texts}


OWNER, PLAIN = "ragkv", "plain"
MAX_INDEXES = 64


class ModelChoice(NamedTuple):
    """The index of a model id, and its engine if it names one."""

    name: str
    rag: RagKV
    engine: str | None
    plain: bool = False
    """Whether the model alone is asked, without the documents."""


class ServedIndexes:
    """The server's open indexes by name. A model id is `ragkv/NAME` or `ragkv/NAME:ENGINE`; `NAME` alone works too.
    `ragkv/NAME:plain` is the index's model alone.

    `made` is a file that remembers the indexes that `create` has made, by name, for the next start. An index that was
    deleted or replaced on disk is unavailable (503). Each request for it starts another attempt to
    open it, in a thread.
    """

    def __init__(self, indexes: Mapping[str, RagKV], made: Path | None = None) -> None:
        self._indexes = dict(indexes)
        self._made = made
        self._lock = threading.Lock()
        self._opening: dict[str, threading.Thread] = {}
        self._closed = False

    def __iter__(self) -> Iterator[tuple[str, RagKV]]:
        return iter(list(self._indexes.items()))

    def available(self) -> list[tuple[str, RagKV]]:
        """The indexes that are available now."""
        return [(name, rag) for name, rag in self if self._in_place(name, rag)]

    def model_ids(self, *, engines: bool) -> list[str]:
        """The model ids: each available index, and its model alone; with `engines`, also one per index and engine."""
        more = [f":{engine}" for engine in (PLAIN, *(engine_names() if engines else ()))]
        return [f"{OWNER}/{name}{engine}" for name, _ in self.available() for engine in ("", *more)]

    def chosen(self, model: str) -> ModelChoice:
        """The index and engine of a model id; ApiError 404 if it is unknown."""
        name, colon, engine = model.removeprefix(f"{OWNER}/").partition(":")
        if name not in self._indexes or (colon and engine not in (PLAIN, *engine_names())):
            known = ", ".join(f"{OWNER}/{name}" for name in self._indexes)
            message = (
                f"There is no model {model!r}; there are {known}, each also with an engine (NAME:ape) or as NAME:plain."
            )
            raise ApiError(404, message, param="model", code="model_not_found")
        plain = engine == PLAIN
        return ModelChoice(name, self.index(name), None if plain else engine or None, plain)

    def index(self, name: str) -> RagKV:
        """The index of this name; ApiError 404 if there is none, 503 if it was deleted or replaced."""
        if name not in self._indexes:
            message = f"There is no index {name!r}; there are {', '.join(self._indexes)}."
            raise ApiError(404, message, param="name", code="not_found")
        note_span({"ragkv.index": name})
        rag = self._indexes[name]
        if not self._in_place(name, rag):
            message = f"Index {name!r} was deleted, moved or replaced; ask again when it is back."
            raise ApiError(503, message, kind="server_error", code="index_unavailable", headers={"retry-after": "2"})
        return rag

    def create(self, name: str, like: RagKV) -> RagKV:
        """Make an empty index in a folder of this name beside the one of `like`, with its settings, and serve it.

        ApiError 409 if there is such an index or folder, or if the folder cannot be made.
        """
        taken = ApiError(409, f"There is an index or a folder {name!r} already; choose another name.", param="name")
        if like.config.qdrant.url:
            raise ApiError(409, "An index with a Qdrant collection is made on the command line.", param="like")
        folder = like.folder.resolve().parent / name
        with self._lock:
            if self._closed:
                raise stopping_error()
            if name in self._indexes or folder.exists():
                raise taken
            if len(self._indexes) >= MAX_INDEXES:
                raise ApiError(409, f"There are {MAX_INDEXES} indexes, the most that can be made here.", param="name")
            settings = {field.name: getattr(like.config, field.name) for field in fields(like.config)}
            opening: dict[str, Any] = {"device": like.index.device, **like.index.limits.given}
            try:
                type(like).create(folder, load=False, **settings).close()
                fresh = type(like).open(folder, **opening)
            except (RagkvError, OSError) as error:
                logger.warning("index %s cannot be made: %s", name, error)
                raise ApiError(409, f"The server cannot make the index {name!r}; its log says more.") from error
            fresh.index.share_model(like.index)
            self._indexes[name] = fresh
            if self._made is not None:
                remember_index(self._made, name, folder)
        return fresh

    def close(self) -> None:
        """Close every index; running answers end."""
        with self._lock:
            self._closed = True
        for thread in list(self._opening.values()):
            thread.join()
        for _, rag in self:
            rag.close()

    def _in_place(self, name: str, rag: RagKV) -> bool:
        """Whether the index is available; if not, start to open it again."""
        if rag.store.in_place:
            return True
        with self._lock:
            if not self._closed and name not in self._opening:
                self._opening[name] = threading.Thread(target=self._open_again, args=(name, rag), name="ragkv-open")
                self._opening[name].start()
        return False

    def _open_again(self, name: str, old: RagKV) -> None:
        try:
            fresh = copy.copy(old)
            try:
                fresh.index.share_model(old.index)
                fresh.index.require_same_model()
                fresh.model  # noqa: B018 - load the model now, so that the first question need not wait
            except BaseException:
                fresh.close()
                raise
            self._indexes[name] = fresh
            old.close()
            logger.warning("index %s was replaced: it is answered from what is there now", name)
        except (RagkvError, OSError) as error:
            logger.warning("index %s cannot be answered from: %s", name, error)
        finally:
            with self._lock:
                del self._opening[name]


def made_indexes(file: Path) -> dict[str, str]:
    """The folders of the indexes that a server has made, by name, from the file of `ServedIndexes`."""
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
        return {str(name): str(folder) for name, folder in known.items() if (Path(folder) / CONFIG_FILE).is_file()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def remember_index(file: Path, name: str, folder: Path) -> None:
    """Add an index to the file; without it, the next start does not serve the index by itself."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({**made_indexes(file), name: str(folder)}), encoding="utf-8")
    except OSError as error:
        logger.warning("index %s is not remembered for the next start: %s", name, error)


def chunk_urls(request: Request, name: str) -> Callable[[Source], str]:
    """A function from a source to the URL of its chunk, under the host that the client used."""
    base = f"{str(request.base_url).rstrip('/')}/api/indexes/{quote(name)}/chunks"
    return lambda source: f"{base}/{quote(source.chunk_id, safe='')}"


def index_facts(name: str, rag: RagKV) -> dict[str, Any]:
    """One index."""
    config, stats = rag.config, rag.store.stats()
    return {
        "name": name,
        "documents": stats.documents,
        "chunks": stats.chunks,
        "model": Path(config.model).name if Path(config.model).is_absolute() else config.model,
        "engines": supported_engines(rag.model),
        "default_engine": config.default_engine,
        "top_k": config.top_k,
        "retrieval": list(served(() if config.embedder == NONE else config.vectors)),
        "default_retrieval": config.retrieval,
        "rerank": config.rerank and config.reranker != NONE,
        "reranker": config.reranker != NONE,
        "embedder": config.embedder != NONE,
        "writable": not rag.store.readonly,
    }


def all_facts(served: Iterable[tuple[str, RagKV]]) -> list[dict[str, Any]]:
    """The facts of all readable indexes. A deleted one is left out; its error is raised if there is no other."""
    facts: list[dict[str, Any]] = []
    failed: RagkvError | None = None
    for name, rag in served:
        try:
            facts.append(index_facts(name, rag))
        except RagkvError as error:
            logger.warning("index %s is not listed: %s", name, error)
            failed = error
    if failed is not None and not facts:
        raise failed
    return facts


def document_page(rag: RagKV, name: str, where: Sequence[str], *, after: str, limit: int) -> dict[str, Any]:
    """Documents that meet `where` and whose source has `name` in it, or matches it as a pattern."""
    text = composed(name).casefold()
    pattern = Pattern(text)

    def holds(document: Document) -> bool:
        sources = [value.casefold() for value in values_of(document, "source")]
        return any(text in source or pattern.matches(source) for source in sources)

    if name:
        chosen = rag.select(where=where) if where else None
        page = list_documents(rag.store, chosen, only=holds, after=after, limit=limit)
    else:
        page = rag.list_documents(where=where, after=after, limit=limit)
    total = rag.store.stats().documents
    return {"documents": [_facts(view) for view in page.documents], "next": page.after, "total": total}


def document_facts(rag: RagKV, document_id: str) -> dict[str, Any] | None:
    """One document with its text's length; None when there is none."""
    stored, text = rag.store.document(document_id), rag.store.text(document_id)
    stats = next(rag.store.document_stats([document_id]), None)
    if stored is None or stats is None:
        return None
    return {**_facts(DocumentView(document=stored.document, stats=stats)), "characters": len(text or "")}


def _facts(view: DocumentView) -> dict[str, Any]:
    facts = view.to_json()
    source = view.document.source
    return {"document_id": facts.pop("document"), "name": PurePosixPath(source).name or source, **facts}
