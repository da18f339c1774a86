"""`ragkv mcp`: an index as read-only tools for assistants and editors, by the Model Context Protocol."""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import wraps
from typing import Annotated, Any, ParamSpec, TypeVar

import mcp_types
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel, Field

import ragkv
from ragkv.errors import RagkvError
from ragkv.index.search import chunk_named
from ragkv.pipeline import RagKV
from ragkv.question import question_arguments, question_options
from ragkv.server.errors import readable_error
from ragkv.server.local import LocalClient, UnservedError, query_body
from ragkv.server.schemas import FailFastList, ListedDocument, ShownChunk, fields_of
from ragkv.types import Answer, Source

MAX_LISTED_DOCUMENTS = 1000
P = ParamSpec("P")
R = TypeVar("R")

Conditions = Annotated[
    FailFastList[str] | None,
    Field(description="Only documents that meet FIELD=PATTERN, as in source=notes/*.md, or a metadata key."),
]


@fields_of(Source, "chunk_id", "document", "text", "page", "heading", "score", "snippet", "highlights")
class FoundPassage(BaseModel):
    """A chunk of a document, and how relevant it is (from 0 to 1)."""


class FoundPassages(BaseModel):
    """The passages that were found, best first."""

    passages: list[FoundPassage]


@fields_of(Answer, "text", "engine", "finish_reason", "queries", text="answer")
class ToolAnswer(BaseModel):
    """An answer, the passages it was made from, best first, and the search queries that the model has written."""

    sources: list[FoundPassage]


class Documents(BaseModel):
    """Documents in the order of their ids. `after`: list again with it for those behind; null when there are none."""

    documents: list[ListedDocument]
    after: str | None


def make_tools(rag: RagKV, name: str, server: LocalClient | None = None) -> MCPServer:
    """The tools `search`, `ask`, `show` and `list_documents` over an open index, with typed results.

    The index's `server`, if there is one, does what needs a model.
    """
    tools = MCPServer(
        name=f"ragkv {name}",
        version=ragkv.__version__,
        instructions=(
            f"Documents of the index {name!r}. `search` finds passages, `ask` answers a question from them and names "
            "its sources, `show` gives one passage, `list_documents` says what there is."
        ),
        log_level="WARNING",
    )
    reads = mcp_types.ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)

    def tool(name: str) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Awaitable[R]]]:
        return lambda work: tools.tool(name, annotations=reads)(_with_tool_errors(work))

    async def served(work: Callable[[LocalClient], R]) -> R | None:
        """The result of a request to the index's server; None if there is no server."""
        if server is not None:
            with suppress(UnservedError):
                return await asyncio.to_thread(work, server)
        return None

    @tool("search")
    @_with_options("mcp", "search")
    async def search(question: str, **options: Any) -> FoundPassages:
        """Find the passages of the documents that say most about a question or some words, best first."""
        sources = await served(lambda client: client.search({"question": question, **options}))
        if sources is None:
            chunks = await asyncio.to_thread(rag.retrieve, question, **options)
            sources = [source.to_json() for source in await asyncio.to_thread(rag.sources, question, chunks)]
        return FoundPassages(passages=list(map(_passage, sources)))

    @tool("ask")
    @_with_options("mcp")
    async def ask(question: str, **options: Any) -> ToolAnswer:
        """Answer a question from the documents, with the passages that the answer was made from."""
        body, identifier = query_body(question, options), secrets.token_hex(8)
        try:
            answer = await served(lambda client: client.query(body, lambda warning: None, identifier).answer)
        except asyncio.CancelledError:  # the thread that waits for it ends with the answer
            await asyncio.shield(served(lambda client: client.cancel(identifier)))
            raise
        if answer is None:
            answer = await rag.aquery(question, **question_arguments(options))
        sources = [_passage(source.to_json()) for source in answer.sources]
        return ToolAnswer.model_validate({**answer.to_json(), "sources": sources})

    @tool("show")
    async def show(
        chunk: Annotated[str, Field(description="A chunk's id or its start, or DOCUMENT:NUMBER (from 0).")],
    ) -> ShownChunk:
        """Show one passage; with DOCUMENT:NUMBER, its neighbours can be read one after another."""
        return ShownChunk.of(await asyncio.to_thread(chunk_named, rag.store, chunk))

    @tool("list_documents")
    async def documents(
        pattern: Annotated[str | None, Field(description="Id, source name, or a pattern such as notes/*.")] = None,
        where: Conditions = None,
        after: Annotated[str, Field(description="List those behind this id, as the page before says.")] = "",
        limit: Annotated[int, Field(ge=1, le=MAX_LISTED_DOCUMENTS)] = 100,
    ) -> Documents:
        """List the documents of the index."""
        names = [] if pattern is None else [pattern]
        page = await asyncio.to_thread(rag.list_documents, names, where or [], after=after, limit=limit)
        return Documents(documents=[ListedDocument.of(view) for view in page.documents], after=page.after)

    return tools


_MOST = {"top_k": 256, "max_new_tokens": 4096}
"""What an assistant may ask for at most."""
_USUAL = {"max_new_tokens": 256}


def _with_options(*names: str) -> Callable[[Callable[..., Awaitable[R]]], Callable[..., Awaitable[R]]]:
    """A decorator for a tool: an argument for each option of a question that all of these doors show."""

    def extend(work: Callable[..., Awaitable[R]]) -> Callable[..., Awaitable[R]]:
        signature = inspect.signature(work, eval_str=True)
        parameters = list(signature.parameters.values())[:-1]
        for field in question_options().values():
            if not field.option.doors.issuperset(names):
                continue
            option, most = field.option, _MOST.get(field.name, field.option.most)
            kind: Any = FailFastList[str] if field.is_list else field.type
            annotation: Any = Annotated[kind | None, Field(ge=option.least, le=most, description=option.help)]
            default = _USUAL.get(field.name)
            parameters.append(
                inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
            )
        vars(work)["__signature__"] = signature.replace(parameters=parameters)
        return work

    return extend


def _with_tool_errors(work: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    """Turn ragkv's errors into the protocol's, with the same message."""

    @wraps(work)
    async def wrapped(*arguments: P.args, **named: P.kwargs) -> R:
        try:
            return await work(*arguments, **named)
        except RagkvError as error:
            raise ToolError(readable_error(error)) from error

    return wrapped


def _passage(source: Mapping[str, Any]) -> FoundPassage:
    return FoundPassage.model_validate({name: source.get(name) for name in FoundPassage.model_fields})
