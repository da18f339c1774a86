"""Which sources are cited for the sentences of an answer."""

import pytest

from ragkv.index.snippets import is_refusal
from ragkv.server.api import cited
from ragkv.types import Answer, KVUse, Source, Timing

KESK = "# Linodyne Paper\n\nLinodyne Paper is a company in the town of Kesk. It employs 360 people and makes Ranatix."
VERL = "# Pelophor Press\n\nPelophor Press is a company in the town of Verl. It was founded by Ada Brill in 1907."
QUESTION = "Where are Linodyne Paper and Pelophor Press?"


def answer(text, *sources):
    result = tuple(
        Source(document="d", chunk_id=str(n), text=t, page=None, score=0.5, retrieval_score=0.5, rerank_score=None)
        for n, t in enumerate(sources)
    )
    timing = Timing(retrieve=0, rerank=0, load=0, first_token=0, total=0)
    kv = KVUse()
    return Answer(question="", text=text, engine="full", finish_reason="stop", sources=result, timing=timing, kv=kv)


def spans(text, *sources, question=QUESTION):
    return [(text[each.start : each.end], each.sources) for each in cited(question, answer(text, *sources))]


def test_each_sentence_is_cited_with_the_source_that_says_it():
    text = "Linodyne Paper is in Kesk. Pelophor Press is in Verl."
    assert spans(text, KESK, VERL) == [
        ("Linodyne Paper is in Kesk.", (0,)),
        ("Pelophor Press is in Verl.", (1,)),
    ]
    assert spans(text, VERL, KESK) == [
        ("Linodyne Paper is in Kesk.", (1,)),
        ("Pelophor Press is in Verl.", (0,)),
    ]


def test_a_sentence_from_two_sources_has_both_and_neighbours_of_one_source_are_one():
    assert spans("Kesk has Linodyne Paper, while Ada Brill founded Pelophor Press.", KESK, VERL)[0][1] == (1, 0)
    text = "It is in Kesk. It employs 360 people."
    assert spans(text, KESK, VERL) == [(text, (0,))]


def test_what_no_source_says_is_not_cited():
    assert spans("It is in the town of Narvik.", KESK, VERL) == []
    assert spans("Kesk", VERL) == []
    assert spans("Kesk") == []
    assert spans("", KESK) == spans("...", KESK) == []


def test_of_two_sources_that_hold_the_answer_the_one_about_the_question_is_cited():
    other = "Ostra Steel employs 360 people."
    assert spans("360", other, KESK, question="How many people work at Linodyne Paper?") == [("360", (1,))]


@pytest.mark.parametrize(
    "text",
    [
        "The documents do not say.",
        "Ada Brill was born in ... The documents do not say.",
        "The provided context doesn't mention it.",
        "This is not mentioned in the documents.",
        "I don't know.",
    ],
)
def test_a_refusal_is_not_cited(text):
    assert is_refusal(text)
    assert spans(text, f"{KESK} {text}", VERL) == []


def test_a_sentence_beside_a_refusal_is_cited():
    text = "Linodyne Paper is in Kesk. The documents do not say who founded it."
    assert not is_refusal(text)
    assert spans(text, KESK, VERL) == [("Linodyne Paper is in Kesk.", (0,))]
    assert not is_refusal("")
    assert not is_refusal("The documents say that it is in Kesk.")


def test_markdown_is_cited_by_its_words():
    text = "\n".join(
        [
            "## Towns",
            "1. **Linodyne Paper** is in Kesk",
            "2. *Pelophor Press* is in Verl.",
            "",
            "| company | town |",
            "| --- | --- |",
            "| Linodyne Paper | Kesk |",
            "",
            "```text",
            "Linodyne Paper is in Kesk.",
            "```",
        ]
    )
    assert spans(text, KESK, VERL) == [
        ("**Linodyne Paper** is in Kesk", (0,)),
        ("*Pelophor Press* is in Verl.", (1,)),
        ("Linodyne Paper | Kesk", (0,)),
    ]


def test_scripts_without_spaces_are_cited():
    kesk, verl = "林氏纸业位于柯斯克镇。", "佩洛出版社位于维尔镇。"
    text = "林氏纸业在柯斯克。佩洛出版社在维尔。"
    assert spans(text, verl, kesk, question="它们在哪里?") == [
        ("林氏纸业在柯斯克。", (1,)),
        ("佩洛出版社在维尔。", (0,)),
    ]


@pytest.mark.parametrize(
    "piece", ["! ", ". a ", "the documents ", "| - ", "```\n", "``` x\n", "[" * 9, "> " * 9, "\n", "a.\n"]
)
def test_a_long_strange_answer_is_looked_at_in_a_moment(piece):
    text = piece * (20_000 // len(piece))
    for each in cited("a", answer(text, *["a documents"] * 1000)):  # quadratic code would hang
        assert text[each.start : each.end].strip()
        assert each.sources == (0,)
    is_refusal(text)
