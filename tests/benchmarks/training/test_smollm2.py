"""The data of smollm2's adapter, without the packages of Debian that some of it is about."""

import random

from ragkv.benchmarks.training.smollm2 import adapter
from ragkv.benchmarks.training.smollm2.worlds import documents


def test_generated_documents_hold_the_keys_of_their_answers():
    """`documents` checks each of them."""
    assert documents(3, 40) == documents(3, 40) != documents(4, 40)


def test_rows_ask_about_passages_among_others():
    rng = random.Random(0)
    sources = list(adapter.documents(rng))[:30]
    lines = list(adapter.rows(rng, sources, ["Git keeps history. " * 20] * 12))
    assert len(lines) > 20
    for line in lines:
        assert line.keys() == {"questions", "blocks"}
        assert 1 <= len(line["blocks"]) <= 8
        assert all(question.keys() == {"prompt", "response"} for question in line["questions"])
    answers = {question["response"] == adapter.UNKNOWN for line in lines for question in line["questions"]}
    assert answers == {True, False}
