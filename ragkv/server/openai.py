"""OpenAI's protocol: `/v1/chat/completions`, `/v1/models`, `/v1/embeddings`, and Jina's and Cohere's rerank route.

Each parameter of a request is used, ignored as documented, or refused by name. None changes an answer silently.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import numpy as np
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from ragkv.decoding import Decoding, schema_text
from ragkv.errors import MissingExtraError, NothingFoundError, UsageError
from ragkv.index.answer import AnswerStream
from ragkv.index.batch import AsyncAnswerStream
from ragkv.index.contexts import given_chunk
from ragkv.model.tools import ToolCallParser, tool_format, tool_tail
from ragkv.pipeline import RagKV
from ragkv.server.errors import ApiError, Json, event, pack_json, readable_error, to_api_error
from ragkv.server.metrics import ConcurrencyLimiter
from ragkv.server.schemas import (
    EVENTS,
    OWNER,
    AnswerSource,
    ConversationOptions,
    FailFastList,
    ModelChoice,
    ServedIndexes,
    chunk_urls,
    question_fields,
)
from ragkv.server.streaming import (
    AnswerResponse,
    ConversationText,
    ThoughtDeltas,
    TrimmedText,
    in_conversation,
    require_unicode,
    unless_gone,
)
from ragkv.types import Answer, Source
from ragkv.util import batches

T = TypeVar("T")

MAX_MESSAGES = 512
MAX_CONTENT_PARTS = 4096
MAX_TOOLS = 128
STRUCTURED_TOKENS = 1024
"""The default token limit for JSON, calls and the like."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "store": (False,),
}
"""Unsupported parameters, and the values besides null that have no effect and are accepted."""


class CalledFunction(BaseModel):
    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    arguments: str


class ToolCall(BaseModel):
    """A call that the model has made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolFunction(BaseModel):
    """A function that the model may call; its arguments always follow `parameters` (a JSON schema), `strict` or not."""

    model_config = ConfigDict(extra="ignore")
    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str = ""
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    type: Literal["function"]
    function: ToolFunction


class ContentPart(BaseModel):
    """A part of a message's content; only text is understood."""

    model_config = ConfigDict(extra="allow")
    type: str
    text: str | None = None


class Message(BaseModel):
    """One message. Fields that clients send back from earlier answers are accepted and ignored."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[FailFastList[ContentPart], Field(max_length=MAX_CONTENT_PARTS)] | None = None
    tool_calls: Annotated[FailFastList[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None

    def text(self, place: int) -> str:
        """The message's text; ApiError, with the message's index, if it contains anything else."""
        for name in ("function_call", "audio"):
            if (self.model_extra or {}).get(name):
                raise _unsupported(f"messages[{place}].{name}")
        if not isinstance(self.content, list):
            return self.content or ""
        for index, part in enumerate(self.content):
            if part.type not in ("text", "input_text") or part.text is None:
                raise _unsupported(f"messages[{place}].content[{index}]", f"a part of type {part.type!r}")
        return "\n".join(part.text or "" for part in self.content)


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


@question_fields(without=("system", "top_k", "max_new_tokens"))
class ChatRequest(ConversationOptions):
    """The body of `POST /v1/chat/completions`: OpenAI's parameters and ragkv's own."""

    model_config = ConfigDict(extra="allow", strict=False)
    model: str
    messages: FailFastList[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    top_k: int | None = None
    """vLLM's parameter: sample from this many most likely tokens; 0 and -1 mean all."""
    top_k_chunks: int | None = None
    """ragkv's own parameter: the number of chunks to answer from."""
    # accepted and ignored: they are for the client's own records, or do not affect the answer
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    tools: Annotated[FailFastList[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    footer: bool = False
    """ragkv's own parameter: end the answer with its sources, as Markdown."""

    @property
    def names(self) -> dict[str, str]:
        """This protocol's names for options of `RagKV.stream`, where they differ."""
        return {
            "question": f"messages[{len(self.messages) - 1}]",
            "max_new_tokens": "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens",
            "top_k": "top_k_chunks",
            "top_k_tokens": "top_k" if self.option("top_k_tokens") is None else "top_k_tokens",
            "schema": "schema" if self.response_format is None else "response_format",
            "grammar": "tools" if self.tools else "grammar",
        }

    def token_limit(self) -> int | None:
        """None, and many clients' -1, mean the default. It is larger for JSON and calls: half of one is useless."""
        given = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        constrained = self.tools or self.option("regex") or self.option("grammar") or self.answer_schema() is not None
        return STRUCTURED_TOKENS if constrained and given in (None, -1) else None if given == -1 else given

    def sampled_top_k(self) -> int | None:
        """The sampler's top-k."""
        tokens: int | None = self.option("top_k_tokens")
        if self.top_k is None or self.top_k in (0, -1):
            return tokens
        if tokens not in (None, self.top_k):
            raise ApiError(400, "top_k and top_k_tokens mean the same; leave one out.", param="top_k")
        return self.top_k

    def answer_schema(self) -> Any:
        """The JSON schema of the answer; None for any text."""
        match self.response_format:
            case None | {"type": "text"}:
                return self.option("schema")
            case _ if self.option("schema") is not None:
                raise ApiError(400, "response_format and schema mean the same; leave one out.", param="schema")
            case {"type": "json_object"}:
                return {"type": "object"}
            case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
                return schema
        message = 'response_format is {"type": "json_schema", "json_schema": {"schema": {…}}}, "json_object" or "text".'
        raise ApiError(400, message, param="response_format")

    def callable_tools(self) -> list[dict[str, Any]]:
        """The tools that may be called."""
        named: Any = None
        if isinstance(self.tool_choice, dict):
            function = self.tool_choice.get("function")
            named = function.get("name") if isinstance(function, dict) else None
            if named not in [tool.function.name for tool in self.tools or ()]:
                message = 'tool_choice is "none", "auto", "required", or {"type": "function", "function": {"name": …}}.'
                raise ApiError(400, f"{message[:-1]} with the name of one of the tools.", param="tool_choice")
        if self.tool_choice == "none":
            return []
        by_name = {}
        for tool in self.tools or ():
            shown = tool.function.model_dump()
            shown["parameters"] = {"type": "object", "additionalProperties": False, **(shown["parameters"] or {})}
            if named in (None, shown["name"]):
                by_name[shown["name"]] = shown
        if self.tool_choice == "required" and not by_name:
            raise ApiError(400, "tool_choice is required, but there are no tools.", param="tool_choice")
        return list(by_name.values())

    def tool_options(self, chosen: ModelChoice, words: ConversationText, later: Sequence[Message]) -> dict[str, Any]:
        """The options for tools and their results: the prompt after the documents, and the grammar of calls."""
        tools = self.callable_tools()
        if not tools and not later:
            return {}
        if tools and (self.option("stop") or self.option("regex") is not None or self.option("grammar") is not None):
            raise ApiError(400, "stop, regex and grammar cannot be used together with tools.", param="tools")
        model = chosen.rag.model
        turns = [
            {**message.model_dump(include={"role", "tool_calls", "tool_call_id"}), "content": message.text(place)}
            for place, message in enumerate(later, start=len(self.messages) - len(later))
        ]
        options: dict[str, Any] = {"tail": tool_tail(model, chosen.rag.index.prompt, words.prompt, tools, turns)}
        if tools:
            required = self.tool_choice == "required" or isinstance(self.tool_choice, dict)
            several = self.parallel_tool_calls is not False and not isinstance(self.tool_choice, dict)
            form = tool_format(model)
            schema = self.answer_schema()
            schema = schema if schema is None else json.loads(schema_text(schema))
            grammar = form.grammar(tools, required=required, several=several, schema=schema)
            try:
                Decoding(grammar=grammar)
            except (UsageError, MissingExtraError):
                self._require_schemas(tools)
                raise
            options["decoding"] = {"grammar": grammar, "schema": None}
        return options

    def _require_schemas(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """ApiError, with its name, for a tool whose parameters no call could be constrained to."""
        places = {tool.function.name: place for place, tool in enumerate(self.tools or ())}
        for tool in tools:
            try:
                Decoding(schema=schema_text(tool["parameters"]))
            except (UsageError, MissingExtraError) as error:
                place = f"tools[{places[tool['name']]}].function.parameters"
                raise to_api_error(error, {"schema": place}) from error

    def options(self, chosen: ModelChoice, words: ConversationText) -> dict[str, Any]:
        """The options of `RagKV.stream`; ApiError if the model and `engine` name different engines.

        A question about the conversation itself is answered by engine `full`, because no KV is stored for it.
        """
        engine: str | None = "full"
        if words.conversation is None:
            wanted = self.option("engine")
            engine = chosen.engine or wanted
            if wanted not in (None, engine):
                message = f"The model names engine {chosen.engine!r}, and `engine` {wanted!r}."
                raise ApiError(400, message, param="engine")
        options = self.query_options(
            words,
            engine=engine,
            top_k=self.top_k_chunks,
            top_k_tokens=self.sampled_top_k(),
            schema=self.answer_schema(),
            max_new_tokens=self.token_limit(),
        )
        if words.conversation is not None:
            given = chosen.rag.chunk(words.conversation, chunk_id="conversation")
            options |= {"chunks": [given_chunk(given, "")], "steps": 1}
        return options

    def require_supported(self) -> None:
        """ApiError, with the parameter's name, for an unknown parameter or an unsupported value."""
        for name in ("max_tokens", "max_completion_tokens"):
            if (most := getattr(self, name)) is not None and most < 1 and most != -1:
                message = f"{name} must be at least 1 (-1 is as if it were left out), not {most}."
                raise ApiError(400, message, param=name)
        for name, value in (self.model_extra or {}).items():
            if name not in _NEUTRAL:
                raise ApiError(400, f"Unknown parameter: {name!r}.", param=name, code="unknown_parameter")
            if value is not None and value not in _NEUTRAL[name]:
                raise _unsupported(name)


def calls_after(messages: Sequence[Message]) -> Sequence[Message]:
    """The calls and results at the end, after the last question."""
    last = max((place for place, message in enumerate(messages) if message.role == "user"), default=-1)
    later = messages[last + 1 :] if last >= 0 else []
    return later if later and later[-1].role == "tool" else []


def conversation_text(messages: Sequence[Message], rag: RagKV, *, rewrite: bool | None = None) -> ConversationText:
    """The question is the last user message; earlier turns are used as in `ragkv chat`.

    The texts of system and developer messages come before the question, calls and results after it come elsewhere
    (`ChatRequest.tool_options`).
    """
    messages = messages[: len(messages) - len(calls_after(messages))]
    texts = [message.text(place) for place, message in enumerate(messages)]
    last = len(messages) - 1
    if messages[last].role != "user" or not texts[last].strip():
        raise ApiError(400, "The last message must be the user's question.", param=f"messages[{last}]")
    turns, asked = [], ""
    for message, text in zip(messages[:last], texts[:last], strict=True):
        if message.role == "user":
            asked = text.strip()
        elif message.role == "assistant" and asked and text.strip():
            turns.append((asked, text.strip()))
            asked = ""
    if (task := _conversation_task(texts[last])) is not None:
        conversation, asked = task
        require_unicode([conversation, asked])
        return ConversationText(asked, asked, conversation)
    instructions = [
        t.strip() for m, t in zip(messages, texts, strict=True) if m.role in ("system", "developer") and t.strip()
    ]
    return in_conversation(rag, texts[last].strip(), turns, instructions, rewrite=rewrite)


def _conversation_task(text: str) -> tuple[str, str] | None:
    """The conversation and the task, if a chat window asks for the conversation's title, tags or next questions.

    Open WebUI sends them as a message that begins with "### Task:" and holds the conversation between marks. The
    documents have nothing to do with it.
    """
    before, begin, rest = text.partition("<chat_history>")
    conversation, end, after = rest.rpartition("</chat_history>")
    if not (begin and end and conversation.strip() and before.lstrip().startswith("### Task:")):
        return None
    return conversation.strip(), f"{before.rstrip()}\n{after.lstrip()}".strip()


def _unsupported(param: str, what: str | None = None) -> ApiError:
    message = f"{param}: {what or 'this parameter'} is not supported; leave it out."
    return ApiError(400, message, param=param, code="unsupported_parameter")


DONE = b"data: [DONE]\n\n"


class ChatFormatter:
    """Role, deltas, the finish reason with the sources, usage, `[DONE]`; or one object. `url_of`: a source's URL.

    An answer about the conversation, not `cited`, has no sources. If no chunk was found, `undocumented` starts an
    answer without documents, for calls; else the answer is a sentence about that, because chat windows show an error as
    a broken server.
    """

    def __init__(
        self,
        asked: ChatRequest,
        url_of: Callable[[Source], str],
        *,
        footer: bool,
        cited: bool = True,
        calls: ToolCallParser | None = None,
        undocumented: Callable[[], AsyncAnswerStream] | None = None,
    ) -> None:
        self.names: Mapping[str, str] = asked.names
        self._asked = asked
        self._url = url_of
        self._footer = footer
        self._cited = cited
        self._calls = calls
        self._undocumented = undocumented
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._trimmed, self._thoughts = TrimmedText(), ThoughtDeltas()
        self._content = ""

    def whole(self, answer: Answer, stream: AsyncAnswerStream) -> dict[str, Any]:
        content, calls = answer.text, list[tuple[str, str]]()
        if self._calls is not None:
            texts = [each for each in self._calls.push(content) if isinstance(each, str)]
            content, calls = ("".join(texts) + self._calls.flush()).strip(), self._calls.calls
        if self._footer and not calls:
            content += self._source_list(answer)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content or (None if calls else ""),
            "refusal": None,
            "annotations": self._annotations(answer, content),
        }
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if calls:
            message["tool_calls"] = [
                {"id": self._call_id(place), "type": "function", "function": {"name": name, "arguments": arguments}}
                for place, (name, arguments) in enumerate(calls)
            ]
        reason = _reason(answer, bool(calls))
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
        return {
            **self._head("chat.completion"),
            "choices": [choice],
            "usage": usage(stream, answer),
            **self._own_fields(answer),
        }

    def on_nothing(self, error: NothingFoundError, stream: AsyncAnswerStream) -> AsyncAnswerStream | Answer:
        if self._undocumented is not None:
            self._cited = False
            return self._undocumented()
        stream.cancel()
        answer = stream.answer
        if any(answer.decoding[name] for name in ("schema", "regex", "grammar")):
            raise to_api_error(error, self.names) from error  # a sentence would not fit the schema
        return replace(answer, text=readable_error(error, self.names), finish_reason="stop", sources=())

    def on_start(self) -> Iterator[bytes]:
        yield self._chunk({"role": "assistant", "content": "", "refusal": None})

    def on_text(self, delta: str, stream: AsyncAnswerStream) -> Iterator[bytes]:
        if more := self._thoughts.take(stream):
            yield self._chunk({"reasoning_content": more})
        for each in (delta,) if self._calls is None else self._calls.push(delta):
            if not isinstance(each, str):
                yield self._called(*each)
            elif shown := self._trimmed.take(each):
                yield self._delta(shown)

    def on_end(self, answer: Answer, stream: AsyncAnswerStream) -> Iterator[bytes]:
        called = self._calls is not None and bool(self._calls.calls)
        if self._calls is not None and (shown := self._trimmed.take(self._calls.flush())):
            yield self._delta(shown)
        if self._footer and not called and (sources := self._source_list(answer)):
            yield self._delta(sources)
        delta = {"annotations": self._annotations(answer, self._content)}
        yield self._chunk(delta, finish=_reason(answer, called), **self._own_fields(answer))
        if self._asked.stream_options is not None and self._asked.stream_options.include_usage:
            yield event({**self._head("chat.completion.chunk"), "choices": [], "usage": usage(stream, answer)})
        yield DONE

    def on_error(self, refusal: ApiError) -> Iterator[bytes]:
        yield event(refusal.body)
        yield DONE

    def _delta(self, text: str) -> bytes:
        self._content += text
        return self._chunk({"content": text})

    def _called(self, place: int, name: str | None, arguments: str) -> bytes:
        """The beginning of a call, or more of its arguments."""
        function = {"arguments": arguments} if name is None else {"name": name, "arguments": arguments}
        head = {} if name is None else {"id": self._call_id(place), "type": "function"}
        return self._chunk({"tool_calls": [{"index": place, **head, "function": function}]})

    def _chunk(self, delta: dict[str, Any], *, finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return event({**self._head("chat.completion.chunk"), "choices": [choice], **more})

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._asked.model,
            "system_fingerprint": None,
        }

    def _call_id(self, place: int) -> str:
        return f"call_{self._id[-24:]}{place}"

    def _own_fields(self, answer: Answer) -> dict[str, Any]:
        """ragkv's own fields of an answer: its chunks as in `ragkv query --json`, with URLs, and how it came about."""
        sources = [{**source.to_json(), "url": self._url(source)} for source in self._sources(answer)]
        return {
            "sources": sources,
            "fields": dict(answer.fields),
            "queries": list(answer.queries),
            "intent": answer.intent,
        }

    def _source_list(self, answer: Answer) -> str:
        """The sources as Markdown, to append to the answer."""
        lines = [f"{i}. [{_plain(s.title)}]({self._url(s)})" for i, s in enumerate(self._sources(answer), start=1)]
        return "\n\nSources:\n" + "\n".join(lines) if lines else ""

    def _annotations(self, answer: Answer, content: str) -> list[dict[str, Any]]:
        return [
            {
                "type": "url_citation",
                "url_citation": {
                    "url": self._url(source),
                    "title": source.title,
                    "start_index": 0,
                    "end_index": len(content),
                },
            }
            for source in self._sources(answer)
        ]

    def _sources(self, answer: Answer) -> Sequence[Source]:
        return answer.sources if self._cited else ()


def _reason(answer: Answer, called: bool) -> str:
    return "tool_calls" if called and answer.finish_reason == "stop" else answer.finish_reason


def usage(stream: AsyncAnswerStream, answer: Answer) -> dict[str, Any]:
    """Tokens that were read and generated; `cached_tokens` are those of chunks whose KV was stored."""
    return {
        "prompt_tokens": stream.prompt_tokens,
        "completion_tokens": stream.tokens,
        "total_tokens": stream.prompt_tokens + stream.tokens,
        "prompt_tokens_details": {"cached_tokens": min(answer.kv.tokens, stream.prompt_tokens)},
    }


def _plain(text: str) -> str:
    """The text with Markdown's characters escaped."""
    return "".join(f"\\{c}" if c in "\\`*_[]()<>#!|" else c for c in " ".join(text.split()))


class ModelCard(BaseModel):
    """An index, or an index with an engine."""

    id: str
    object: str
    created: int
    owned_by: str


class ModelListing(BaseModel):
    object: str
    data: list[ModelCard]


class Citation(BaseModel):
    url: str
    title: str
    start_index: int
    end_index: int


class Annotation(BaseModel):
    type: str
    url_citation: Citation


class ResponseMessage(BaseModel):
    role: str
    content: str | None
    refusal: None
    annotations: list[Annotation]
    tool_calls: list[ToolCall] = Field(default=[], description="Only if the model calls tools.")
    reasoning_content: str = Field(default="", description="Only if the model has thought before it answered.")


class Choice(BaseModel):
    index: int
    message: ResponseMessage
    logprobs: None
    finish_reason: str


class CachedTokens(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class ChatReply(BaseModel):
    """An answer that is not streamed, with the chunks that it is made from."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: None
    choices: list[Choice]
    usage: Usage
    sources: list[AnswerSource]
    fields: dict[str, int] = Field(description="For JSON by PCED: the place among the sources of each value's source.")
    queries: list[str] = Field(description="The search queries that the model has written.")


MAX_TEXTS = 2048
BATCH_TEXTS, BATCH_CHARS = 32, 1 << 13
"""The size of a batch; between batches, cancelled requests end and other requests take their turn."""
Aside: TypeAlias = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a function in the thread for embeddings."""


class EmbeddingRequest(BaseModel):
    """OpenAI's request, with texts, not token ids; `dimensions` may only be the vectors' own length.

    `input_type` "query" embeds the texts as questions, which bge and E5 embed differently.
    """

    model_config = ConfigDict(extra="forbid")
    model: str
    input: (
        str
        | FailFastList[str]
        | FailFastList[int]
        | Annotated[FailFastList[FailFastList[int]], Field(max_length=MAX_TEXTS)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    input_type: Literal["query", "document"] = "document"
    user: str | None = None


class RerankDocument(BaseModel):
    model_config = ConfigDict(extra="ignore")
    text: str


class RerankRequest(BaseModel):
    """The request of Jina's and Cohere's rerankers."""

    model_config = ConfigDict(extra="forbid")
    model: str
    query: str
    documents: FailFastList[str | RerankDocument] = Field(min_length=1, max_length=MAX_TEXTS)
    top_n: int | None = Field(default=None, ge=1)
    max_tokens_per_doc: int | None = Field(default=None, ge=1)
    """Cohere's parameter: score only this many tokens of each document, counted by the index's language model."""
    return_documents: bool | None = None


class EmbeddingUsage(BaseModel):
    """Tokens as the index's language model counts them."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingObject(BaseModel):
    object: str
    index: int
    embedding: list[float] | str = Field(description="Numbers, or base64 of float32 in little-endian order.")


class EmbeddingReply(BaseModel):
    """Vectors of unit length, in the order of the texts."""

    object: str
    model: str
    data: list[EmbeddingObject]
    usage: EmbeddingUsage


class RankedDocument(BaseModel):
    index: int
    relevance_score: float
    document: RerankDocument | None = Field(default=None, description="Not if `return_documents` is false.")


class RerankReply(BaseModel):
    """The best documents first; `index` is a document's place in the request."""

    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage


async def embedded(asked: EmbeddingRequest, chosen: ModelChoice, aside: Aside) -> bytes:
    """The dense vectors of the texts, unit length, in order: an `EmbeddingReply` as JSON."""
    texts = _texts(asked.input)
    if not 0 < len(texts) <= MAX_TEXTS:
        raise ApiError(400, f"`input` holds {len(texts)} texts; send 1 to {MAX_TEXTS}.", param="input")
    require_unicode(texts)

    def work(batch: list[str]) -> tuple[list[bytes], int]:
        embedder = chosen.rag.index.encoders.embedder
        if embedder is None or "dense" not in embedder.modes:
            raise ApiError(400, f"Index {chosen.name!r} has no embedder of dense vectors.", param="model")
        if asked.input_type == "query":
            rows = [embedder.embed_query(text).dense for text in batch]
        else:
            rows = [embedder.embed_documents(batch).dense]
        vectors = np.concatenate([row for row in rows if row is not None]).astype("<f4")
        if asked.dimensions not in (None, vectors.shape[1]):
            message = f"The vectors have {vectors.shape[1]} dimensions and cannot be shortened; leave `dimensions` out."
            raise ApiError(400, message, param="dimensions", code="unsupported_parameter")
        # encoding many vectors as JSON takes seconds and blocks other threads, so each is encoded with its batch
        if asked.encoding_format == "base64":
            packed = [b'"%s"' % base64.b64encode(vector.tobytes()) for vector in vectors]
        else:
            packed = [pack_json(vector.tolist()) for vector in vectors]
        return packed, _tokens(chosen, batch)

    vectors, tokens = await _in_batches(texts, work, aside)
    rows = (b'{"object":"embedding","index":%d,"embedding":%s}' % row for row in enumerate(vectors))
    usage = pack_json({"model": asked.model, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}})
    return b'{"object":"list","data":[%s],%s' % (b",".join(rows), usage[1:])


async def reranked(asked: RerankRequest, chosen: ModelChoice, aside: Aside) -> bytes:
    """The documents, best first, with the sigmoid of the reranker's logit as relevance: a `RerankReply` as JSON."""
    texts = [each if isinstance(each, str) else each.text for each in asked.documents]
    require_unicode([asked.query, *texts])

    def work(batch: list[str]) -> tuple[list[float], int]:
        reranker = chosen.rag.index.encoders.reranker
        if reranker is None:
            raise ApiError(400, f"Index {chosen.name!r} has no reranker.", param="model")
        tokens, most = chosen.rag.model.tokens, asked.max_tokens_per_doc
        if most is not None:
            batch = [text if len(ids := tokens.encode(text)) <= most else tokens.decode(ids[:most]) for text in batch]
        return list(reranker.score(asked.query, batch)), _tokens(chosen, batch)

    logits, tokens = await _in_batches(texts, work, aside)
    tokens += await aside(lambda: _tokens(chosen, [asked.query]))
    scores = [1 / (1 + math.exp(-max(min(logit, 60.0), -60.0))) for logit in logits]
    order = sorted(range(len(texts)), key=lambda index: (-scores[index], index))[: asked.top_n]
    shown = asked.return_documents is not False
    results = [
        {"index": i, "relevance_score": scores[i]} | ({"document": {"text": texts[i]}} if shown else {}) for i in order
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return pack_json({"model": asked.model, "results": results, "usage": usage})


async def _in_batches(
    texts: Sequence[str], work: Callable[[list[str]], tuple[list[T], int]], aside: Aside
) -> tuple[list[T], int]:
    """The results of `work` for each text, in order, and the sum of its counts."""
    results, total = dict[int, T](), 0
    # texts of similar length together, because a model pads them
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    for batch in batches(order, lambda i: len(texts[i]), BATCH_CHARS, count=BATCH_TEXTS):
        values, count = await aside(lambda batch=batch: work([texts[i] for i in batch]))  # type: ignore[misc]
        total += count
        results.update(zip(batch, values, strict=True))
    return [results[i] for i in range(len(texts))], total


def _texts(given: str | list[str] | list[int] | list[list[int]]) -> list[str]:
    """The texts; ApiError for an empty text, and for token ids, because they belong to another tokenizer."""
    texts = [given] if isinstance(given, str) else [each for each in given if isinstance(each, str)]
    if len(texts) != len(given) and not isinstance(given, str):
        message = (
            "Token ids are those of another tokenizer: send texts (in LangChain, check_embedding_ctx_length=False)."
        )
        raise ApiError(400, message, param="input", code="unsupported_parameter")
    if "" in texts:
        raise ApiError(400, "`input` holds an empty text, which means nothing; leave it out.", param="input")
    return texts


def _tokens(chosen: ModelChoice, texts: list[str]) -> int:
    """Tokens as the index's language model counts them."""
    return sum(len(chosen.rag.model.tokens.encode(text)) for text in texts)


def _prepared(body: ChatRequest, chosen: ModelChoice) -> tuple[bool, AnswerStream, Callable[[], AnswerStream] | None]:
    """Whether the answer has sources; the answer, not started; and, if tools may be called, a function that starts one
    without documents.
    """
    words = conversation_text(body.messages, chosen.rag, rewrite=body.rewrite)
    try:
        options: dict[str, Any] = {**body.options(chosen, words)}
        more: dict[str, Any] = {**body.tool_options(chosen, words, calls_after(body.messages))}
        options |= more | {"decoding": options.get("decoding", {}) | more.get("decoding", {})}
        stream = chosen.rag.stream(words.prompt, **options)
    except (UsageError, MissingExtraError) as error:
        raise to_api_error(error, body.names) from error

    def undocumented() -> AnswerStream:
        nothing = given_chunk(chosen.rag.chunk("", chunk_id="nothing"), "")
        return chosen.rag.stream(words.prompt, **{**options, "engine": "full", "chunks": [nothing], "steps": 1})

    return words.conversation is None, stream, undocumented if "decoding" in more else None


def protocol_routes(served: ServedIndexes, limiter: ConcurrencyLimiter, *, footer: bool) -> APIRouter:
    """The protocol over these indexes. `footer`: answers end with their sources, whether a client asks or not."""
    routes = APIRouter(tags=["OpenAI's protocol"])
    created = {name: int(rag.folder.stat().st_mtime) for name, rag in served}

    @routes.get("/v1/models", response_model=ModelListing)
    async def models(engines: bool = False) -> Json:
        """The indexes; with `engines`, each with each engine, too. Both may be asked for, listed or not."""
        return Json({"object": "list", "data": [_model(name) for name in served.model_ids(engines=engines)]})

    @routes.get("/v1/models/{identifier:path}", response_model=ModelCard)
    async def model(identifier: str) -> Json:
        """One of them."""
        chosen = served.chosen(identifier)
        engine = "" if chosen.engine is None else f":{chosen.engine}"
        return Json(_model(f"{OWNER}/{chosen.name}{engine}"))

    @routes.post("/v1/chat/completions", response_model=ChatReply, responses=EVENTS)
    async def completions(body: ChatRequest, request: Request) -> Response:
        """Answer the last message from the index's documents."""
        body.require_supported()
        chosen = served.chosen(body.model)
        preparing = partial(_prepared, body, chosen)  # slow for a long history, a schema, or tools
        cited, stream, tools = await asyncio.get_running_loop().run_in_executor(limiter.asks, preparing)
        index = chosen.rag.index
        formatter = ChatFormatter(
            body,
            chunk_urls(request, chosen.name),
            footer=cited and (footer or body.footer),
            cited=cited,
            calls=None if tools is None else ToolCallParser(tool_format(chosen.rag.model)),
            undocumented=None if tools is None else lambda: AsyncAnswerStream(index, tools),
        )
        tracker = await limiter.admit(chosen.name)
        answering = AsyncAnswerStream(index, lambda: stream)
        return await AnswerResponse(answering, tracker, formatter).begin(request, streamed=body.stream)

    @routes.post("/v1/embeddings", response_model=EmbeddingReply)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Vectors of texts, by the index's embedder."""
        return await _aside(request, partial(embedded, body, served.chosen(body.model)))

    @routes.post("/v1/rerank", response_model=RerankReply)
    async def rerank(body: RerankRequest, request: Request) -> Response:
        """Documents by their relevance, by the index's reranker."""
        return await _aside(request, partial(reranked, body, served.chosen(body.model)))

    def _model(identifier: str) -> dict[str, Any]:
        name = identifier.removeprefix(f"{OWNER}/").partition(":")[0]
        return {"id": identifier, "object": "model", "created": created[name], "owned_by": OWNER}

    async def _aside(request: Request, work: Callable[[Aside], Awaitable[bytes]]) -> Response:
        """The JSON that `work` makes in the thread for embeddings; cancelled if the client disconnects or the server
        stops.
        """
        tracker = await limiter.admit("vectors")
        loop = asyncio.get_running_loop()

        async def aside(part: Callable[[], Any]) -> Any:
            def running() -> Any:
                loop.call_soon_threadsafe(tracker.runs)
                return part()

            return await loop.run_in_executor(limiter.vectors, running)

        working = asyncio.ensure_future(work(aside))
        tracker.cancel = working.cancel
        try:
            return Response(await unless_gone(request, tracker, working), media_type="application/json")
        finally:
            tracker.leave()

    return routes
