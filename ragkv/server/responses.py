"""OpenAI's `/v1/responses`: its input items become the messages of a chat, whose answer becomes output items."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ragkv.errors import NothingFoundError
from ragkv.index.batch import AsyncAnswerStream
from ragkv.server.chat import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatRequest,
    Reply,
    require_neutral,
    unsupported,
    usage,
)
from ragkv.server.errors import ApiError, event
from ragkv.server.schemas import AnswerSource, FailFastList, question_fields
from ragkv.server.streaming import ThoughtDeltas, TrimmedText
from ragkv.types import Answer

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "store": (False,),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "conversation": (),
    "prompt": (),
    "max_tool_calls": (),
}
"""Unsupported parameters, and the values besides null that have no effect and are accepted."""
_OWN = {
    *("input", "instructions", "previous_response_id", "max_output_tokens", "stream", "text", "tools", "tool_choice"),
    *("include", "reasoning", "stream_options"),
}
"""Fields that are translated for the chat, or ignored."""
_CHATS_OWN = ("messages", "stream_options", "max_tokens", "max_completion_tokens", "response_format", "verbosity")


class InputItem(BaseModel):
    """A message, a call that the model made, its result, or a thought, which is ignored."""

    model_config = ConfigDict(extra="allow")
    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | FailFastList[dict[str, Any]] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | FailFastList[dict[str, Any]] | None = None


class ResponseTool(BaseModel):
    model_config = ConfigDict(extra="ignore")
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class TextOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")
    format: dict[str, Any] | None = None


@question_fields(without=("system", "top_k", "max_new_tokens"))
class ResponseRequest(BaseModel):
    """The body of `POST /v1/responses`; the parameters that are not here are those of the chat."""

    model_config = ConfigDict(extra="allow")
    model: str
    input: str | Annotated[FailFastList[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    stream: bool = False
    text: TextOptions | None = None
    tools: Annotated[FailFastList[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    # accepted and ignored
    include: FailFastList[str] | None = None
    reasoning: dict[str, Any] | None = None
    stream_options: dict[str, Any] | None = None

    def chat(self) -> tuple[ChatRequest, Mapping[int, str]]:
        """The request as a chat, and the place in `input` of each of its messages."""
        if self.previous_response_id is not None:
            message = "previous_response_id: nothing is stored here; send the whole conversation as `input`."
            raise ApiError(400, message, param="previous_response_id", code="unsupported_parameter")
        sent = self.model_dump(by_alias=True, exclude_unset=True, exclude=_OWN)
        require_neutral({name: sent.pop(name) for name in (*_NEUTRAL, *_CHATS_OWN) if name in sent}, _NEUTRAL)
        messages, places = self._messages()
        sent |= {"messages": messages, "max_completion_tokens": self.max_output_tokens}
        if self.tools is not None:
            functions = [tool.model_dump(exclude={"type"}, exclude_none=True) for tool in self.tools]
            sent["tools"] = [{"type": "function", "function": function} for function in functions]
        choice = self.tool_choice
        if isinstance(choice, dict):
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        sent["tool_choice"] = choice
        match None if self.text is None else self.text.format:
            case {"type": "json_schema", "schema": dict(schema)}:
                sent["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
            case form:
                sent["response_format"] = form
        return ChatRequest.validated(sent), places

    def _messages(self) -> tuple[list[dict[str, Any]], dict[int, str]]:
        messages, places = list[dict[str, Any]](), dict[int, str]()
        if self.instructions:
            places[0] = "instructions"
            messages.append({"role": "system", "content": self.instructions})
        items = [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        for place, item in enumerate(items):
            where = "input" if isinstance(self.input, str) else f"input[{place}]"
            places.setdefault(len(messages), where)
            match item.type:
                case "message" if item.role is not None:
                    messages.append({"role": item.role, "content": _parts(item.content, f"{where}.content")})
                case "function_call" if item.call_id and item.name and item.arguments is not None:
                    function = {"name": item.name, "arguments": item.arguments}
                    call = {"id": item.call_id, "type": "function", "function": function}
                    if not (messages and messages[-1]["role"] == "assistant"):
                        messages.append({"role": "assistant", "content": None})
                    messages[-1].setdefault("tool_calls", []).append(call)
                case "function_call_output" if item.call_id:
                    text = _parts(item.output, f"{where}.output")
                    messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
                case "reasoning":
                    continue
                case other:
                    raise unsupported(where, f"an item of type {other!r} with these fields")
        return messages, places


def _parts(content: str | list[dict[str, Any]] | None, where: str) -> str:
    """The text of a content."""
    if not isinstance(content, list):
        return content or ""
    for place, part in enumerate(content):
        if part.get("type") not in ("input_text", "output_text", "text") or not isinstance(part.get("text"), str):
            raise unsupported(f"{where}[{place}]", f"a part of type {part.get('type')!r}")
    return "\n".join(part["text"] for part in content)


_NAMES = (
    (r"\bmax_completion_tokens\b", "max_output_tokens"),
    (r"\bresponse_format\b", "text.format"),
    (r"(tools[.\[]\d+\]?)\.function\b", r"\1"),
)


def renamed(error: ApiError, places: Mapping[int, str]) -> ApiError:
    """An error of the chat, with this protocol's names of parameters."""
    body = error.body["error"]

    def name(text: str) -> str:
        for chats, own in _NAMES:
            text = re.sub(chats, own, text)
        return re.sub(r"messages\[(\d+)\](\.content\[\d+\])?", lambda m: places.get(int(m[1]), "input"), text)

    param = None if body["param"] is None else name(body["param"])
    return ApiError(
        error.status,
        name(body["message"]),
        kind=body["type"],
        param=param,
        code=body["code"],
        headers=error.headers,
    )


class ResponseFormatter:
    """A response with output items (a thought, a message, calls); or the events that build it, numbered."""

    def __init__(self, asked: ResponseRequest, chat: ChatRequest, places: Mapping[int, str], reply: Reply) -> None:
        self.names: Mapping[str, str] = {
            name: renamed(ApiError(400, "", param=own), places).body["error"]["param"]
            for name, own in chat.names.items()
        }
        self._asked = asked
        self._chat = chat
        self._reply = reply
        self._key = uuid.uuid4().hex
        self._created = int(time.time())
        self._sequence = 0
        self._output: list[dict[str, Any]] = []
        """The items so far; the last one may be `_open`."""
        self._open = False
        self._trimmed, self._thoughts = TrimmedText(), ThoughtDeltas()

    def whole(self, answer: Answer, stream: AsyncAnswerStream) -> dict[str, Any]:
        if answer.reasoning:
            list(self._thought(answer.reasoning))
        list(self._text(answer.text))
        list(self._finish(answer))
        return self._response(answer, stream)

    def on_nothing(self, error: NothingFoundError, stream: AsyncAnswerStream) -> AsyncAnswerStream | Answer:
        return self._reply.on_nothing(error, stream, self.names)

    def on_start(self) -> Iterator[bytes]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response())

    def on_text(self, delta: str, stream: AsyncAnswerStream) -> Iterator[bytes]:
        if more := self._thoughts.take(stream):
            yield from self._thought(more)
        yield from self._text(delta)

    def on_end(self, answer: Answer, stream: AsyncAnswerStream) -> Iterator[bytes]:
        yield from self._finish(answer)
        response = self._response(answer, stream)
        yield self._event(f"response.{response['status']}", response=response)

    def on_error(self, refusal: ApiError) -> Iterator[bytes]:
        error = refusal.body["error"]
        shown = {name: error[name] for name in ("code", "message", "param")}
        yield self._event("error", **shown)
        failed = {"code": "server_error", "message": error["message"]}
        yield self._event("response.failed", response={**self._response(), "status": "failed", "error": failed})

    def _thought(self, text: str) -> Iterator[bytes]:
        yield from self._begin("reasoning", {"summary": [], "content": []}, {"type": "reasoning_text", "text": ""})
        yield from self._delta("reasoning_text", text)

    def _text(self, delta: str) -> Iterator[bytes]:
        calls = self._reply.calls
        for text_or_call in (delta,) if calls is None else calls.push(delta):
            if isinstance(text_or_call, str):
                yield from self._shown(self._trimmed.take(text_or_call))
                continue
            _, name, arguments = text_or_call
            if name is not None:
                yield from self._close()
                call = {"call_id": f"call_{self._key[-20:]}{len(self._output)}", "name": name, "arguments": ""}
                yield from self._begin("function_call", call)
            if arguments:
                self._output[-1]["arguments"] += arguments
                yield self._of_item("response.function_call_arguments.delta", delta=arguments)

    def _shown(self, text: str) -> Iterator[bytes]:
        if text:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield from self._begin("message", {"role": "assistant", "content": []}, part)
            yield from self._delta("output_text", text, logprobs=[])

    def _finish(self, answer: Answer) -> Iterator[bytes]:
        """What is still held back, the footer and the citations."""
        if self._reply.calls is not None:
            yield from self._shown(self._trimmed.take(self._reply.calls.flush()))
        yield from self._shown(self._reply.footer(answer))
        if self._open and self._output[-1]["type"] == "message":
            part = self._output[-1]["content"][0]
            for place, citation in enumerate(self._reply.citations(answer, part["text"])):
                part["annotations"].append({"type": "url_citation", **citation})
                shown = {"annotation_index": place, "annotation": part["annotations"][-1]}
                yield self._of_item("response.output_text.annotation.added", content_index=0, **shown)
        yield from self._close("completed" if answer.finish_reason == "stop" else "incomplete")

    def _begin(self, kind: str, fields: dict[str, Any], part: dict[str, Any] | None = None) -> Iterator[bytes]:
        """Open an item, and its part, unless one of this kind is open; calls are always new ones."""
        if self._open and self._output[-1]["type"] == kind:
            return
        yield from self._close()
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        item = {"id": f"{prefix}_{self._key}{len(self._output)}", "type": kind, "status": "in_progress", **fields}
        self._output.append(item)
        self._open = True
        yield self._of_item("response.output_item.added", item=item, item_id=None)
        if part is not None:
            item["content"].append(part)
            yield self._of_item("response.content_part.added", content_index=0, part=part)

    def _delta(self, kind: str, text: str, **more: Any) -> Iterator[bytes]:
        self._output[-1]["content"][0]["text"] += text
        yield self._of_item(f"response.{kind}.delta", content_index=0, delta=text, **more)

    def _close(self, status: str = "completed") -> Iterator[bytes]:
        if not self._open:
            return
        item, self._open = self._output[-1], False
        item["status"] = status
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._of_item("response.function_call_arguments.done", **done)
        else:
            part = item["content"][0]
            logprobs: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
            yield self._of_item(f"response.{part['type']}.done", content_index=0, text=part["text"], **logprobs)
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        yield self._of_item("response.output_item.done", item=item, item_id=None)

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        shown = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1, **fields}
        return self._event(kind, **{name: value for name, value in shown.items() if value is not None})

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        return event({"type": kind, "sequence_number": self._sequence - 1, **fields}, kind)

    def _response(self, answer: Answer | None = None, stream: AsyncAnswerStream | None = None) -> dict[str, Any]:
        asked, chat = self._asked, self._chat
        status = "in_progress" if answer is None else "completed" if answer.finish_reason == "stop" else "incomplete"
        form = None if asked.text is None else asked.text.format
        response: dict[str, Any] = {
            "id": f"resp_{self._key}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "model": asked.model,
            "output": self._output,
            "parallel_tool_calls": chat.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": chat.option("temperature"),
            "text": {"format": form or {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": [{"strict": True, **tool.model_dump()} for tool in asked.tools or ()],
            "top_p": chat.option("top_p"),
            "truncation": "disabled",
            "metadata": chat.metadata or {},
            "usage": None,
        }
        if answer is not None and stream is not None:
            used = usage(stream, answer)
            thought = max(stream.tokens - len(answer.trace), 0) if answer.reasoning else 0
            response["usage"] = {
                "input_tokens": used["prompt_tokens"],
                "input_tokens_details": used["prompt_tokens_details"],
                "output_tokens": used["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": thought},
                "total_tokens": used["total_tokens"],
            }
            response |= self._reply.own_fields(answer)
        return response


class ResponseReply(BaseModel):
    """A response that is not streamed, with the chunks that it is made from."""

    model_config = ConfigDict(extra="allow")
    id: str
    object: str
    created_at: int
    status: str
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any]
    sources: list[AnswerSource]
