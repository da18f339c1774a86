"""What a client of OpenAI's chat protocol may ask, and the question that it means.

A parameter is used, ignored as the documentation says, or refused by its name; none changes an answer silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ragkv.index.task import QueryOptions
from ragkv.server.failure import Refusal
from ragkv.server.option import Options
from ragkv.server.served import Chosen
from ragkv.server.words import Words, worded

if TYPE_CHECKING:
    from ragkv.pipeline import RagKV

__all__ = ["ChatRequest", "Message", "words_of"]

MOST_MESSAGES = 512
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "store": (False,),
}
"""Parameters that are not supported, and the values besides null that ask for nothing."""


class Part(BaseModel):
    """A piece of a message's content; only text is understood."""

    model_config = ConfigDict(extra="allow")
    type: str
    text: str | None = None


class Message(BaseModel):
    """One message. Fields that clients send back from earlier answers are taken and not used."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part] | None = None

    def text(self, place: int) -> str:
        """Its text; Refusal, with the place of the message, when it holds anything else."""
        for name in ("tool_calls", "function_call", "audio"):
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


class ChatRequest(Options):
    """The body of `POST /v1/chat/completions`: OpenAI's parameters and ragkv's own."""

    model_config = ConfigDict(extra="allow", strict=False)
    model: str
    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    # taken and not used: they are about the client's own books, or promise nothing about the answer
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    parallel_tool_calls: bool | None = None
    footer: bool = False
    """ragkv's own: whether the answer ends with its sources, as Markdown."""

    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def options(self, chosen: Chosen, words: Words) -> QueryOptions:
        """The options of `RagKV.stream` that it means; Refusal when model and `engine` name two engines."""
        if chosen.engine is not None and self.engine not in (None, chosen.engine):
            message = f"The model names engine {chosen.engine!r}, and `engine` {self.engine!r}."
            raise Refusal(400, message, param="engine")
        return self.query_options(words, engine=chosen.engine)

    def require_supported(self) -> None:
        """Refusal that names a parameter which is unknown, or asks for what there is not."""
        for name, value in (self.model_extra or {}).items():
            if name not in _NEUTRAL:
                raise Refusal(400, f"Unknown parameter: {name!r}.", param=name, code="unknown_parameter")
            if value is not None and value not in _NEUTRAL[name]:
                raise _unsupported(name)


def words_of(messages: Sequence[Message], rag: RagKV) -> Words:
    """The question is the last user message; earlier turns are used as `ragkv chat` uses them.

    What system and developer messages say stands before the question.
    """
    texts = [message.text(place) for place, message in enumerate(messages)]
    last = len(messages) - 1
    if messages[last].role != "user" or not texts[last].strip():
        raise Refusal(400, "The last message must be the user's question.", param=f"messages[{last}]")
    turns, asked = [], ""
    for message, text in zip(messages[:last], texts[:last], strict=True):
        if message.role == "user":
            asked = text.strip()
        elif message.role == "assistant" and asked and text.strip():
            turns.append((asked, text.strip()))
            asked = ""
    said = [t.strip() for m, t in zip(messages, texts, strict=True) if m.role in ("system", "developer") and t.strip()]
    return worded(rag, texts[last].strip(), turns, said)


def _unsupported(param: str, what: str | None = None) -> Refusal:
    message = f"{param}: {what or 'this parameter'} is not supported; leave it out."
    return Refusal(400, message, param=param, code="unsupported_parameter")
