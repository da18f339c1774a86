"""The data of smollm2's adapter, without the packages of Debian that some of it is about."""

import random

from ragkv.benchmarks.training.smollm2 import adapter
from ragkv.benchmarks.training.smollm2.worlds import asked_as, documents, parse


def test_generated_documents_hold_the_keys_of_their_answers():
    """`documents` checks each of them."""
    assert documents(3, 40) == documents(3, 40) != documents(4, 40)


def test_questions_in_other_words_name_their_thing_where_another_could_be_meant():
    notation = "@ x\nset brand = Ada\nS the {brand}\n* weight: 3 kg\n> {T} weighs {v}.\n? What does {S} weigh?\n"
    fact = parse(notation + "?p How heavy is it? | Is {S} hard to lift?\n= {v}")[0].facts["weight"][0]
    draws = [[asked_as(fact, "?", random.Random(seed), named=named) for seed in range(20)] for named in (False, True)]
    assert {way for ways in draws[0] for way in ways} == {
        "What does {S} weigh?",
        "How heavy is it?",
        "Is {S} hard to lift?",
    }
    assert {way for ways in draws[1] for way in ways} == {"What does {S} weigh?", "Is {S} hard to lift?"}


def test_a_question_is_asked_in_several_ways():
    question = adapter.Asked("a?", "b", "b", ("c?", "d?", "e?"))
    for seed in range(20):
        both, single = question.wordings(random.Random(seed), 2), question.wordings(random.Random(seed), 1)
        assert len(set(both)) == 2
        assert len(single) == 1
        assert {*both, *single} <= {"a?", "c?", "d?", "e?"}
    assert adapter.Asked("a?", "b", "b").wordings(random.Random(0), 2) == ["a?"]


def test_rows_ask_about_passages_among_others():
    rng = random.Random(0)
    sources = list(adapter.documents(rng))[:30]
    lines = list(adapter.rows(rng, sources, ["Git keeps history. " * 20] * 12))
    assert len(lines) > 20
    for line in lines:
        assert line.keys() == {"questions", "blocks"}
        assert 1 <= len(line["blocks"]) <= 4
        assert all(question.keys() == {"prompt", "response"} for question in line["questions"])
    answers = {question["response"] == adapter.UNKNOWN for line in lines for question in line["questions"]}
    assert answers == {True, False}
