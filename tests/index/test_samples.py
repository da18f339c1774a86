"""Questions to begin with, made from documents."""

import pytest

from ragkv import RagKV
from ragkv.ingest import from_bytes

TEXTS = {
    "choir.md": "# Tour\n\nThe flight takes two hours. The price is £585.",
    "farm.md": "# Farm\n\n**How many turbines will there be?** Seven. **What do you say?** Nothing.",
    "works.md": "# Halden Works\n\nHalden Works was founded by Ann Bolt. Its doors are red.",
}
FACTS = ["How long does the flight take?", "How many turbines will there be?", "Who founded Halden Works?"]


@pytest.fixture
def index(tmp_path, model_folder):
    with RagKV.create(tmp_path / "index", model=str(model_folder), device="cpu", chunk_tokens=64, load=False) as rag:
        yield rag


def test_facts_and_asked_questions_come_first_one_of_each_document(index):
    assert index.sample_questions() == []
    index.ingest([from_bytes(text.encode(), name=name) for name, text in TEXTS.items()])
    assert index.sample_questions() == FACTS
    assert index.sample_questions(2) == FACTS[:2]
    assert index.sample_questions(9) == [*FACTS, "What is the price?"]


def test_a_question_whose_answer_the_search_does_not_find_first_is_left_out(index):
    """A file that only repeats the words is found before the passage."""
    index.ingest(from_bytes(TEXTS["works.md"].encode(), name="works.md"))
    assert index.sample_questions() == ["Who founded Halden Works?"]
    index.ingest(from_bytes(b"who founded halden works", name="a.md"))
    assert index.sample_questions() == []
