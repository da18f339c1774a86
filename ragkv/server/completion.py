"""One answer as the objects of OpenAI's chat protocol, streamed and not."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

from ragkv.types import Answer, Source

__all__ = ["Completion"]


class Completion:
    """One answer's objects. `model` is the id that was asked for; `url_of` gives a source's address."""

    def __init__(self, model: str, url_of: Callable[[Source], str]) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._model = model
        self._url = url_of
        self._created = int(time.time())

    def role(self) -> dict[str, Any]:
        """The first object of a stream."""
        return self._chunk({"role": "assistant", "content": "", "refusal": None})

    def delta(self, text: str) -> dict[str, Any]:
        """A piece of the answer."""
        return self._chunk({"content": text})

    def last(self, answer: Answer, content: str) -> dict[str, Any]:
        """The object that says why the answer ended, with its sources; `content` is all that was sent."""
        told = self._chunk({"annotations": self._annotations(answer, content)}, finish=answer.finish_reason)
        return {**told, "sources": self.sources(answer)}

    def usage(self, prompt: int, generated: int, answer: Answer) -> dict[str, Any]:
        """The object that a stream ends with if its client wants to know what it used."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage(prompt, generated, answer)}

    def whole(self, answer: Answer, prompt: int, generated: int, *, footer: bool) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        content = answer.text + (self.footer(answer) if footer else "")
        message = {
            "role": "assistant",
            "content": content,
            "refusal": None,
            "annotations": self._annotations(answer, content),
        }
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}
        return {
            **self._head("chat.completion"),
            "choices": [choice],
            "usage": usage(prompt, generated, answer),
            "sources": self.sources(answer),
        }

    def footer(self, answer: Answer) -> str:
        """The sources as Markdown, to stand below the answer."""
        lines = [f"{i}. [{_plain(s.title)}]({self._url(s)})" for i, s in enumerate(answer.sources, start=1)]
        return "\n\nSources:\n" + "\n".join(lines) if lines else ""

    def sources(self, answer: Answer) -> list[dict[str, Any]]:
        """The chunks behind the answer as `ragkv query --json` tells them, each with its address."""
        return [{**source.to_json(), "url": self._url(source)} for source in answer.sources]

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
            for source in answer.sources
        ]

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": None,
        }


def usage(prompt: int, generated: int, answer: Answer) -> dict[str, Any]:
    """Tokens that were read and generated; `cached_tokens` are those of chunks whose KV was stored."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": min(answer.kv.tokens, prompt)},
    }


def _plain(text: str) -> str:
    """Text that stays text in Markdown."""
    return "".join(f"\\{c}" if c in "\\`*_[]()<>#!|" else c for c in " ".join(text.split()))
