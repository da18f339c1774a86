"""What a client of OpenAI's chat protocol may ask, and the question that it means.

A parameter is used, ignored as the documentation says, or refused by its name; none changes an answer silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from ragkv.config import PromptConfig
from ragkv.index.conversation import Conversation
from ragkv.index.task import QueryOptions
from ragkv.server.failure import Refusal

__all__ = ["ChatRequest", "Message", "Words", "options_of", "words_of"]

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


class ChatRequest(BaseModel):
    """The body of `POST /v1/chat/completions`: OpenAI's parameters, and below them ragkv's own."""

    model_config = ConfigDict(extra="allow", strict=False)
    model: str
    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    # taken and not used: they are about the client's own books, or promise nothing about the answer
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    parallel_tool_calls: bool | None = None
    # ragkv's own
    engine: str | None = None
    top_k: int | None = None
    retrieval: str | None = None
    rerank: bool | None = None
    candidates: int | None = None
    where: list[str] | None = None
    min_p: float | None = None
    top_k_tokens: int | None = None
    repetition_penalty: float | None = None
    footer: bool = False

    def require_supported(self) -> None:
        """Refusal that names a parameter which is unknown, or asks for what there is not."""
        for name, value in (self.model_extra or {}).items():
            if name not in _NEUTRAL:
                raise Refusal(400, f"Unknown parameter: {name!r}.", param=name, code="unknown_parameter")
            if value is not None and value not in _NEUTRAL[name]:
                raise _unsupported(name)


class Words(NamedTuple):
    """A question as it is searched for, and as the prompt holds it."""

    search: str
    prompt: str


def words_of(messages: Sequence[Message], prompt: PromptConfig, count: Any) -> Words:
    """The question is the last user message; earlier turns are used as `ragkv chat` uses them.

    What system and developer messages say stands before the question: the prompt's own beginning is that of the stored
    KV and cannot change. `count` counts the tokens of a text.
    """
    texts = [message.text(place) for place, message in enumerate(messages)]
    last = len(messages) - 1
    if messages[last].role != "user" or not texts[last].strip():
        raise Refusal(400, "The last message must be the user's question.", param=f"messages[{last}]")
    conversation, asked = Conversation(prompt, count), ""
    for message, text in zip(messages[:last], texts[:last], strict=True):
        if message.role == "user":
            asked = text.strip()
        elif message.role == "assistant" and asked and text.strip():
            conversation.add(asked, text.strip())
            asked = ""
    said = [t.strip() for m, t in zip(messages, texts, strict=True) if m.role in ("system", "developer") and t.strip()]
    question = texts[last].strip()
    whole = conversation.prompt_text(question)
    return Words(conversation.search_text(question), "\n\n".join([*said, whole]))


def options_of(request: ChatRequest, engine: str | None, words: Words) -> QueryOptions:
    """The options of `RagKV.stream` that a request means; what it does not say is as `ragkv.toml` says."""
    if engine is not None and request.engine not in (None, engine):
        raise Refusal(400, f"The model names engine {engine!r}, and `engine` {request.engine!r}.", param="engine")
    stop = [request.stop] if isinstance(request.stop, str) else request.stop
    decoding = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "min_p": request.min_p,
        "top_k_tokens": request.top_k_tokens,
        "repetition_penalty": request.repetition_penalty,
        "seed": request.seed,
        "stop": stop,
    }
    options: QueryOptions = {
        "engine": engine or request.engine,
        "top_k": request.top_k,
        "retrieval": request.retrieval,
        "rerank": request.rerank,
        "candidates": request.candidates,
        "where": request.where or (),
        "search_for": words.search,
        "decoding": {name: value for name, value in decoding.items() if value is not None},
    }
    most = request.max_completion_tokens or request.max_tokens
    if most is not None:
        options["max_new_tokens"] = most
    return options


def _unsupported(param: str, what: str | None = None) -> Refusal:
    message = f"{param}: {what or 'this parameter'} is not supported; leave it out."
    return Refusal(400, message, param=param, code="unsupported_parameter")
