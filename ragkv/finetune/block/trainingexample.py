"""Read the examples that the user's model is trained on from a JSONL file, and check them before the training.

There are two forms, both read as blocks | question | response (Block-Attention §2.2: independent parts are blocks):

- `{"prompt", "blocks", "response"}`: a question, its retrieved passages, the answer. The prompt around them is that of
  `ragkv query`.
- `{"messages"}`, optionally with `"documents"`: a chat, rendered as it is written. Without `documents`, the first
  message of the user is cut at its blank lines: the last paragraph is the question, those before it are blocks. Fenced
  code is never cut. As in `ragkv chat`, earlier turns are part of the question.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ragkv.config import PromptConfig
from ragkv.errors import UsageError
from ragkv.index.conversation import Conversation, Turn

__all__ = ["TrainingExample", "file_digest", "parse_example", "read_examples"]

_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")
_AS_WRITTEN = PromptConfig(system="", context="", question="{question}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingExample:
    """One line of the file: the blocks, the question and the answer. `prompt` is the text around them."""

    source: str
    prompt: PromptConfig
    blocks: tuple[str, ...]
    question: str
    response: str


def read_examples(path: Path, prompt: PromptConfig) -> list[TrainingExample]:
    """The examples in `path`. Raises UsageError, which names the file and the first bad line."""
    examples = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    examples.append(parse_example(line, f"{path}, line {number}", prompt))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read ({error}); give a JSONL file in UTF-8.") from error
    if not examples:
        raise UsageError(f"{path} holds no example; docs/finetune.md shows what a line looks like.")
    return examples


def parse_example(line: str, source: str, prompt: PromptConfig) -> TrainingExample:
    """Parse one line of JSON. `source` names it in errors. Unknown keys are ignored."""
    try:
        found = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{source}: not JSON ({error}).") from error
    if not isinstance(found, dict) or ("messages" in found) == ("prompt" in found):
        raise UsageError(f'{source}: a line is one JSON object with either "messages" or "prompt".')
    if "messages" in found:
        return _chat(found, source, prompt)
    return TrainingExample(
        source=source,
        prompt=prompt,
        blocks=_texts(found, "blocks", source),
        question=_text(found, "prompt", source),
        response=_text(found, "response", source),
    )


def file_digest(path: Path) -> str:
    """The SHA-256 of the file's bytes, which records the data that a model was tuned on."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _chat(found: Mapping[str, Any], source: str, words: PromptConfig) -> TrainingExample:
    messages = found["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UsageError(f'{source}: "messages" must be a list of objects with "role" and "content".')
    prompt, turns = replace(_AS_WRITTEN, bos=words.bos), list(messages)
    if turns and turns[0].get("role") == "system":
        prompt = replace(prompt, system=_text(turns.pop(0), "content", f"{source}, system message"))
    roles = [turn.get("role") for turn in turns]
    if not roles or len(roles) % 2 or roles != ["user", "assistant"] * (len(roles) // 2):
        raise UsageError(
            f'{source}: "messages" must be an optional system message, then user and assistant in turn, '
            "the assistant last."
        )
    texts = [_text(turn, "content", f"{source}, message {number}") for number, turn in enumerate(turns, start=1)]
    if "documents" in found:
        blocks = _texts(found, "documents", source)
    else:
        *before, texts[0] = _paragraphs(texts[0])
        blocks = tuple(before)
    past = Conversation(
        prompt, len, history_tokens=sum(map(len, texts)) * 2 + 100 * len(texts)
    )  # so that no turn is left out
    past.turns += [Turn(question=q, answer=a) for q, a in zip(texts[:-2:2], texts[1:-2:2], strict=True)]
    return TrainingExample(
        source=source,
        prompt=prompt,
        blocks=blocks,
        question=past.prompt_text(texts[-2]),
        response=texts[-1],
    )


def _paragraphs(text: str) -> list[str]:
    """At least one paragraph: `text` cut at blank lines, but never inside ``` fences."""
    found: list[str] = []
    is_open = False
    for piece in _BLANK_LINES.split(text.strip()):
        if is_open:
            found[-1] += f"\n\n{piece}"
        else:
            found.append(piece)
        is_open ^= sum(line.lstrip().startswith("```") for line in piece.splitlines()) % 2 == 1
    return found


def _text(found: Mapping[str, Any], key: str, source: str) -> str:
    value = found.get(key)
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f'{source}: "{key}" must be a text that is not empty.')
    return value


def _texts(found: Mapping[str, Any], key: str, source: str) -> tuple[str, ...]:
    value = found.get(key)
    if not isinstance(value, list) or not all(isinstance(text, str) and text.strip() for text in value):
        raise UsageError(f'{source}: "{key}" must be a list of texts, none of them empty.')
    return tuple(value)
