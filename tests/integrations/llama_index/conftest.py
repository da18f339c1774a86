"""The mini model on a readable corpus, the equivalent command, and the events of the dispatcher."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from outcome import typed

from ragkv import RagKV
from ragkv.cli.main import main

EXAMPLES = Path(__file__).parents[3] / "examples"
QUESTIONS = [json.loads(line) for line in (EXAMPLES / "questions.jsonl").read_text(encoding="utf-8").splitlines()]
MODELS = {"model": "mini", "embedder": "none", "reranker": "none"}
CATALOGUE = EXAMPLES / "corpus" / "product-catalogue.pdf"


@pytest.fixture(scope="session")
def questions() -> list[str]:
    return [question["question"] for question in QUESTIONS]


@pytest.fixture(scope="session")
def rag(tmp_path_factory) -> Iterator[RagKV]:
    """Tests must not write to it."""
    with RagKV.create(tmp_path_factory.mktemp("llama") / "index", **MODELS, device="cpu") as made:
        made.ingest(*(EXAMPLES / "corpus" / question["document"] for question in QUESTIONS[:3]), CATALOGUE)
        yield made


@pytest.fixture
def own(tmp_path) -> Iterator[RagKV]:
    with RagKV.create(tmp_path / "own", **MODELS, device="cpu", engines=("block",)) as made:
        yield made


@pytest.fixture
def command(rag, capsys, monkeypatch) -> Callable[..., dict[str, Any]]:
    """The result of `ragkv query --json` for a question to the same index."""
    ragkv = typed(main, capsys, monkeypatch)
    return lambda *words: json.loads(ragkv("query", *words, "--index", rag.folder, "--json").out)


class _Ear(BaseEventHandler):
    events: list[Any] = []  # noqa: RUF012 - a pydantic field

    def handle(self, event: Any, **_: Any) -> None:
        self.events.append(event)

    def names(self) -> list[str]:
        return [event.class_name() for event in self.events]

    def among(self, *names: str) -> list[str]:
        return [name for name in self.names() if name in names]


@pytest.fixture
def result() -> Iterator[_Ear]:
    ear, root = _Ear(), get_dispatcher()
    before = list(root.event_handlers)
    root.add_event_handler(ear)
    yield ear
    root.event_handlers = before
