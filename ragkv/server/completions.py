"""OpenAI's `/v1/completions`. To an index, a prompt is a question; the model alone (`:plain`) continues the text."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ragkv.errors import MissingExtraError, NothingFoundError, UsageError
from ragkv.index.answer import AnswerStream
from ragkv.index.batch import AsyncAnswerStream
from ragkv.server.chat import DONE, ChatRequest, Message, StreamOptions, Usage, prepare, unsupported
from ragkv.server.errors import ApiError, event, readable_error, to_api_error
from ragkv.server.schemas import FailFastList, ModelChoice, question_fields
from ragkv.server.streaming import TrimmedText, require_unicode
from ragkv.types import Answer

MAX_CHOICES = 32
"""The most answers to one request."""


@question_fields(without=("system", "top_k", "max_new_tokens"))
class CompletionRequest(BaseModel):
    """The body of `POST /v1/completions`; the parameters that are not here are those of the chat."""

    model_config = ConfigDict(extra="allow")
    model: str
    prompt: str | FailFastList[str] | FailFastList[int] | FailFastList[FailFastList[int]]
    """One text or several; for the model alone also token ids, which are taken as they are."""
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    """Answers to each prompt; with a `seed`, the further ones have the seeds after it."""
    echo: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    best_of: int | None = None
    suffix: str | None = None
    logprobs: int | None = None

    @property
    def prompts(self) -> Sequence[str | Sequence[int]]:
        prompt = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        return prompt  # type: ignore[return-value]

    def chat(self, text: str, place: int) -> ChatRequest:
        """The chat request of one prompt for the `place`-th answer to it."""
        own = {"prompt", "n", "echo", "stream", "stream_options", "best_of", "suffix", "logprobs"}
        sent = self.model_dump(by_alias=True, exclude_unset=True, exclude=own)
        for name in ("messages", "tools", "tool_choice", "parallel_tool_calls", "max_completion_tokens"):
            if name in sent:
                raise ApiError(400, f"Unknown parameter: {name!r}.", param=name, code="unknown_parameter")
        body = ChatRequest.validated({**sent, "messages": [Message(role="user", content=text)]})
        seed = body.option("seed")
        if place and seed not in (None, -1):
            body = body.model_copy(update={"seed": (seed + place) % (1 << 63)})
        return body


def prepare_completions(body: CompletionRequest, chosen: ModelChoice) -> tuple[list[AnswerStream], Mapping[str, str]]:
    """The answers of a request, prompt after prompt, and the protocol's names of options."""
    if body.best_of not in (None, body.n):
        raise ApiError(400, "best_of must be n, or left out.", param="best_of", code="unsupported_parameter")
    for name in ("suffix", "logprobs"):
        if getattr(body, name) is not None:
            raise unsupported(name)
    if not 0 < len(body.prompts) * body.n <= MAX_CHOICES:
        message = f"{len(body.prompts)} prompts with {body.n} answers each; send 1 to {MAX_CHOICES} in all."
        raise ApiError(400, message, param="prompt")
    streams, names = list[AnswerStream](), dict[str, str]()
    for prompt in body.prompts:
        if isinstance(prompt, str):
            require_unicode([prompt])
        elif not chosen.plain:
            message = f"A question is a text; send token ids to {body.model.partition(':')[0]}:plain."
            raise ApiError(400, message, param="prompt", code="unsupported_parameter")
        elif not all(0 <= each < chosen.rag.model.config.vocab_size for each in prompt):
            raise ApiError(400, "The prompt has token ids that the model has not.", param="prompt")
        if body.echo and not isinstance(prompt, str):
            raise unsupported("echo", "a repetition of token ids")
        if not prompt:
            raise ApiError(400, "A prompt is empty.", param="prompt")
        for place in range(body.n):
            chat = body.chat(prompt if isinstance(prompt, str) else "ids", place)
            chat.require_supported()
            names = {**chat.names, "question": "prompt"}
            try:
                streams.append(_continued(chat, chosen, prompt) if chosen.plain else prepare(chat, chosen).stream)
            except (UsageError, MissingExtraError) as error:
                raise to_api_error(error, names) from error
    return streams, names


def _continued(chat: ChatRequest, chosen: ModelChoice, prompt: str | Sequence[int]) -> AnswerStream:
    """The model's continuation of a text, without its chat template. Names of control tokens in it are plain text."""
    if isinstance(prompt, str):
        tokens = chosen.rag.model.tokens
        prompt = chosen.rag.index.prompt.with_bos(tokens, tokens.encode(prompt))
    return chosen.rag.stream("text", **chat.plain_arguments(), prompt_ids=tuple(prompt))


class Choices(AsyncAnswerStream):
    """Several answers as one stream; `place` is that of the answer whose text came last.

    If no chunk was found for one of them, its text says so.
    """

    def __init__(self, streams: Sequence[AsyncAnswerStream], names: Mapping[str, str]) -> None:
        self.streams = streams
        self.place = 0
        self._names = names
        self._instead: dict[int, Answer] = {}
        self._merged = self._merge()

    def __aiter__(self) -> AsyncIterator[str]:
        return self._merged

    def cancel(self) -> None:
        for stream in self.streams:
            stream.cancel()

    async def aclose(self) -> None:
        self.cancel()
        await self._merged.aclose()
        for stream in self.streams:
            await stream.aclose()

    @property
    def answers(self) -> list[Answer]:
        return [self._instead.get(place) or stream.answer for place, stream in enumerate(self.streams)]

    @property
    def answer(self) -> Answer:
        """The first one, or one that was cut short."""
        answers = self.answers
        return next((each for each in answers if each.finish_reason == "cancelled"), answers[0])

    @property
    def tokens(self) -> int:
        return sum(stream.tokens for stream in self.streams)

    @property
    def prompt_tokens(self) -> int:
        return sum(stream.prompt_tokens for stream in self.streams)

    async def _merge(self) -> AsyncGenerator[str]:
        deltas = [aiter(stream) for stream in self.streams]
        coming = {asyncio.ensure_future(anext(each, None)): place for place, each in enumerate(deltas)}
        try:
            while coming:
                ready, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
                for task in ready:
                    place = coming.pop(task)
                    try:
                        delta = task.result()
                    except NothingFoundError as error:
                        delta = self._nothing(place, error)
                    if delta is not None:
                        if place not in self._instead:
                            coming[asyncio.ensure_future(anext(deltas[place], None))] = place
                        self.place = place
                        yield delta
        finally:
            for task in coming:
                task.cancel()
            await asyncio.gather(*coming, return_exceptions=True)

    def _nothing(self, place: int, error: NothingFoundError) -> str:
        stream = self.streams[place]
        stream.cancel()
        answer, text = stream.answer, readable_error(error, self._names)
        if any(answer.decoding[name] for name in ("schema", "regex", "grammar")):
            raise to_api_error(error, self._names) from error
        self._instead[place] = replace(answer, text=text, finish_reason="stop", sources=())
        return text


class CompletionFormatter:
    """Texts with the place of their answer, finish reasons, usage, `[DONE]`; or one object.

    A continuation of a text keeps the white space at its ends.
    """

    def __init__(self, asked: CompletionRequest, choices: Choices, names: Mapping[str, str], *, plain: bool) -> None:
        self.names = names
        self._asked = asked
        self._choices = choices
        self._plain = plain
        self._trimmed = [TrimmedText() for _ in choices.streams]
        self._echoed = set[int]()
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def whole(self, answer: Answer, stream: AsyncAnswerStream) -> dict[str, Any]:
        texts = [self._text(place, each) for place, each in enumerate(self._choices.answers)]
        choices = [self._choice(place, self._echo(place) + text, last=True) for place, text in enumerate(texts)]
        return {**self._head(), "choices": choices, "usage": self._usage()}

    def on_nothing(self, error: NothingFoundError, stream: AsyncAnswerStream) -> Answer:
        raise error

    def on_start(self) -> Iterator[bytes]:
        return iter(())

    def on_text(self, delta: str, stream: AsyncAnswerStream) -> Iterator[bytes]:
        place = self._choices.place
        shown = self._echo(place) + (delta if self._plain else self._trimmed[place].take(delta))
        if shown:
            yield event({**self._head(), "choices": [self._choice(place, shown)]})

    def on_end(self, answer: Answer, stream: AsyncAnswerStream) -> Iterator[bytes]:
        for place in range(len(self._choices.streams)):
            yield event({**self._head(), "choices": [self._choice(place, self._echo(place), last=True)]})
        if self._asked.stream_options is not None and self._asked.stream_options.include_usage:
            yield event({**self._head(), "choices": [], "usage": self._usage()})
        yield DONE

    def on_error(self, refusal: ApiError) -> Iterator[bytes]:
        yield event(refusal.body)
        yield DONE

    def _text(self, place: int, answer: Answer) -> str:
        return "".join(token.text for token in answer.trace) if self._plain else answer.text

    def _echo(self, place: int) -> str:
        """The prompt, once, if it is to be repeated."""
        prompt = self._asked.prompts[place // self._asked.n]
        if not self._asked.echo or place in self._echoed or not isinstance(prompt, str):
            return ""
        self._echoed.add(place)
        return prompt

    def _choice(self, place: int, text: str, *, last: bool = False) -> dict[str, Any]:
        reason = self._choices.answers[place].finish_reason if last else None
        return {"index": place, "text": text, "logprobs": None, "finish_reason": reason}

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "object": "text_completion", "created": self._created, "model": self._asked.model}

    def _usage(self) -> dict[str, Any]:
        prompt, generated = self._choices.prompt_tokens, self._choices.tokens
        cached = sum(answer.kv.tokens for answer in self._choices.answers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": min(cached, prompt)},
        }


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: None
    finish_reason: str


class CompletionReply(BaseModel):
    """Completions that are not streamed, in the order of the prompts."""

    id: str
    object: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
