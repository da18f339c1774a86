"""OpenAI's `/v1/chat/completions`. Its request is also what those of `/v1/completions` and `/v1/responses` are
translated to, so that one path leads from a request to its answer (`prepare`).

Each parameter of a request is used, ignored as documented, or refused by name. None changes an answer silently.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ragkv.decoding import Decoding, schema_text
from ragkv.errors import MissingExtraError, NothingFoundError, UsageError
from ragkv.index.answer import AnswerStream
from ragkv.index.batch import AsyncAnswerStream
from ragkv.index.contexts import given_chunk
from ragkv.model.tools import ToolCallParser, chat_tail, tool_format, tool_tail
from ragkv.pipeline import RagKV
from ragkv.question import question_options
from ragkv.server.errors import ApiError, event, readable_error, to_api_error
from ragkv.server.schemas import (
    AnswerSource,
    ConversationOptions,
    FailFastList,
    ModelChoice,
    question_fields,
)
from ragkv.server.streaming import (
    ConversationText,
    ThoughtDeltas,
    TrimmedText,
    in_conversation,
    require_unicode,
)
from ragkv.types import Answer, Source

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
                raise unsupported(f"messages[{place}].{name}")
        if not isinstance(self.content, list):
            return self.content or ""
        for index, part in enumerate(self.content):
            if part.type not in ("text", "input_text") or part.text is None:
                raise unsupported(f"messages[{place}].content[{index}]", f"a part of type {part.type!r}")
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

    @classmethod
    def validated(cls, fields: Mapping[str, Any]) -> ChatRequest:
        """The request with these fields, which came in another form; RequestValidationError as for a body."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            wrong = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
            raise RequestValidationError(wrong, body=fields) from error

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
        turns = self._turns(len(self.messages) - len(later))
        tail = tool_tail(chosen.rag.model, chosen.rag.index.prompt, words.prompt, tools, turns)
        return {"tail": tail, **self._calls(chosen, tools)}

    def plain_options(self, chosen: ModelChoice) -> dict[str, Any]:
        """The options of `RagKV.stream` for the model alone, with the conversation as its chat template has it."""
        turns = self._turns(0)
        last = len(turns) - 1
        role, text = turns[last]["role"], turns[last]["content"].strip()
        if role == "assistant" or not (text or role == "tool"):
            raise ApiError(400, "The last message must be the user's question.", param=f"messages[{last}]")
        require_unicode(turn["content"] for turn in turns)
        tools = self.callable_tools()
        options = self.plain_arguments()
        more = self._calls(chosen, tools)
        decoding = options.get("decoding", {}) | more.get("decoding", {})
        tail = chat_tail(chosen.rag.model, turns, tools)
        return options | {"question": text or role, "decoding": decoding, "tail": tail}

    def plain_arguments(self) -> dict[str, Any]:
        """The options for the model alone, without the prompt; ApiError for one that only matters to a search."""
        for name in ("engine", "retrieval", "rerank", "candidates", "where", "steps", "rewrite", "top_k_chunks"):
            if (self.option(name) if name in question_options() else getattr(self, name)) is not None:
                raise unsupported(name, f"a search, of which {self.model!r} makes none,")
        return self.arguments(
            engine="full",
            top_k=None,
            top_k_tokens=self.sampled_top_k(),
            schema=self.answer_schema(),
            max_new_tokens=self.token_limit(),
        ) | {"chunks": ()}

    def _turns(self, start: int) -> list[dict[str, Any]]:
        """The messages from `start` on, for a chat template."""
        return [
            {**message.model_dump(include={"role", "tool_calls", "tool_call_id"}), "content": message.text(place)}
            for place, message in enumerate(self.messages[start:], start=start)
        ]

    def _calls(self, chosen: ModelChoice, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The decoding for calls of these tools."""
        if tools and (self.option("stop") or self.option("regex") is not None or self.option("grammar") is not None):
            raise ApiError(400, "stop, regex and grammar cannot be used together with tools.", param="tools")
        if tools:
            required = self.tool_choice == "required" or isinstance(self.tool_choice, dict)
            several = self.parallel_tool_calls is not False and not isinstance(self.tool_choice, dict)
            form = tool_format(chosen.rag.model)
            schema = self.answer_schema()
            schema = schema if schema is None else json.loads(schema_text(schema))
            grammar = form.grammar(tools, required=required, several=several, schema=schema)
            try:
                Decoding(grammar=grammar)
            except (UsageError, MissingExtraError):
                self._require_schemas(tools)
                raise
            return {"decoding": {"grammar": grammar, "schema": None}}
        return {}

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
        require_neutral(self.model_extra, _NEUTRAL)


def require_neutral(extra: Mapping[str, Any] | None, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """ApiError for a parameter that is not in `neutral`, or has none of the values there."""
    for name, value in (extra or {}).items():
        if name not in neutral:
            raise ApiError(400, f"Unknown parameter: {name!r}.", param=name, code="unknown_parameter")
        if value is not None and value not in neutral[name]:
            raise unsupported(name)


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
        return ConversationText((asked,), asked, conversation)
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


def unsupported(param: str, what: str | None = None) -> ApiError:
    message = f"{param}: {what or 'this parameter'} is not supported; leave it out."
    return ApiError(400, message, param=param, code="unsupported_parameter")


DONE = b"data: [DONE]\n\n"


class Reply:
    """What the formats of one answer share: where its sources are, its calls, and what is sent if no chunk was found.

    An answer about the conversation or of the model alone is not `cited` and has no sources. If no chunk was found,
    `undocumented` starts an answer without documents, for calls; else the answer is a sentence about that, because
    chat windows show an error as a broken server.
    """

    def __init__(
        self, prepared: Prepared, chosen: ModelChoice, url_of: Callable[[Source], str], *, footer: bool = False
    ) -> None:
        self._index = chosen.rag.index
        self._url = url_of
        self._footer = footer
        self._cited = prepared.cited
        self._undocumented = prepared.undocumented
        self.calls = None if self._undocumented is None else ToolCallParser(tool_format(chosen.rag.model))

    def split(self, text: str) -> str:
        """The whole answer without its `calls`."""
        if self.calls is None:
            return text
        return ("".join(each for each in self.calls.push(text) if isinstance(each, str)) + self.calls.flush()).strip()

    @property
    def called(self) -> list[tuple[str, str]]:
        """Name and arguments of each call."""
        return [] if self.calls is None else self.calls.calls

    def on_nothing(
        self, error: NothingFoundError, stream: AsyncAnswerStream, names: Mapping[str, str]
    ) -> AsyncAnswerStream | Answer:
        if self._undocumented is not None:
            self._cited = False
            return AsyncAnswerStream(self._index, self._undocumented)
        stream.cancel()
        answer = stream.answer
        if any(answer.decoding[name] for name in ("schema", "regex", "grammar")):
            raise to_api_error(error, names) from error  # a sentence would not fit the schema
        return replace(answer, text=readable_error(error, names), finish_reason="stop", sources=())

    def own_fields(self, answer: Answer) -> dict[str, Any]:
        """ragkv's own fields of an answer: its chunks as in `ragkv query --json`, with URLs, and how it came about."""
        sources = [{**source.to_json(), "url": self._url(source)} for source in self._sources(answer)]
        return {
            "sources": sources,
            "fields": dict(answer.fields),
            "queries": list(answer.queries),
            "intent": answer.intent,
        }

    def footer(self, answer: Answer) -> str:
        """The sources as Markdown, to append to the answer, if they are to be."""
        sources = self._sources(answer) if self._footer and not self.called else ()
        lines = [f"{i}. [{_plain(s.title)}]({self._url(s)})" for i, s in enumerate(sources, start=1)]
        return "\n\nSources:\n" + "\n".join(lines) if lines else ""

    def citations(self, answer: Answer, content: str) -> list[dict[str, Any]]:
        """Every source as a citation of the whole answer."""
        place = {"start_index": 0, "end_index": len(content)}
        return [{"url": self._url(source), "title": source.title, **place} for source in self._sources(answer)]

    def _sources(self, answer: Answer) -> Sequence[Source]:
        return answer.sources if self._cited else ()


class ChatFormatter:
    """Role, deltas, the finish reason with the sources, usage, `[DONE]`; or one object."""

    def __init__(self, asked: ChatRequest, reply: Reply) -> None:
        self.names: Mapping[str, str] = asked.names
        self._asked = asked
        self._reply = reply
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._trimmed, self._thoughts = TrimmedText(), ThoughtDeltas()
        self._content = ""

    def whole(self, answer: Answer, stream: AsyncAnswerStream) -> dict[str, Any]:
        content = self._reply.split(answer.text)
        calls = self._reply.called
        content += self._reply.footer(answer)
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
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self._reason(answer)}
        return {
            **self._head("chat.completion"),
            "choices": [choice],
            "usage": usage(stream, answer),
            **self._reply.own_fields(answer),
        }

    def on_nothing(self, error: NothingFoundError, stream: AsyncAnswerStream) -> AsyncAnswerStream | Answer:
        return self._reply.on_nothing(error, stream, self.names)

    def on_start(self) -> Iterator[bytes]:
        yield self._chunk({"role": "assistant", "content": "", "refusal": None})

    def on_text(self, delta: str, stream: AsyncAnswerStream) -> Iterator[bytes]:
        if more := self._thoughts.take(stream):
            yield self._chunk({"reasoning_content": more})
        calls = self._reply.calls
        for each in (delta,) if calls is None else calls.push(delta):
            if not isinstance(each, str):
                yield self._called(*each)
            elif shown := self._trimmed.take(each):
                yield self._delta(shown)

    def on_end(self, answer: Answer, stream: AsyncAnswerStream) -> Iterator[bytes]:
        calls = self._reply.calls
        if calls is not None and (shown := self._trimmed.take(calls.flush())):
            yield self._delta(shown)
        if sources := self._reply.footer(answer):
            yield self._delta(sources)
        delta = {"annotations": self._annotations(answer, self._content)}
        yield self._chunk(delta, finish=self._reason(answer), **self._reply.own_fields(answer))
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

    def _annotations(self, answer: Answer, content: str) -> list[dict[str, Any]]:
        return [{"type": "url_citation", "url_citation": each} for each in self._reply.citations(answer, content)]

    def _reason(self, answer: Answer) -> str:
        return "tool_calls" if self._reply.called and answer.finish_reason == "stop" else answer.finish_reason


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """An answer that has not started, and whether it has sources. If tools may be called, `undocumented` starts one
    without documents.
    """

    stream: AnswerStream
    cited: bool = False
    undocumented: Callable[[], AnswerStream] | None = None


def prepare(body: ChatRequest, chosen: ModelChoice) -> Prepared:
    """The answer to a request, which a long history, a schema, or tools make slow."""
    if chosen.plain:
        return _prepare_plain(body, chosen)
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

    cited = words.conversation is None
    return Prepared(stream=stream, cited=cited, undocumented=undocumented if "decoding" in more else None)


def _prepare_plain(body: ChatRequest, chosen: ModelChoice) -> Prepared:
    try:
        options = body.plain_options(chosen)
        start = partial(chosen.rag.stream, options.pop("question"), **options)
        return Prepared(stream=start(), undocumented=start if body.callable_tools() else None)
    except (UsageError, MissingExtraError) as error:
        raise to_api_error(error, body.names) from error
