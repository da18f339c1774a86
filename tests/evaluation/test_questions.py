"""Specs and questions are parsed as written, and errors quote the invalid part."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.doctor.questions import GoldenQuestion, made_questions, read_questions
from ragkv.doctor.specs import Spec, parse_specs
from ragkv.errors import ConfigError, UsageError


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("full", [Spec("full")]),
        (" full , ape,,full", [Spec("full"), Spec("ape")]),
        ("pced(gamma=0, beta=shared)", [Spec("pced", {"gamma": 0, "beta": "shared"})]),
        ("pced(beta=0.5),pced()", [Spec("pced", {"beta": 0.5}), Spec("pced")]),
        ("block(preset=no-positions)", [Spec("block", {"preset": "no-positions"})]),
        (
            'ape(instruction="Say (a, b) = \\"c\\"\\n")',
            [Spec("ape", {"instruction": 'Say (a, b) = "c"\n'})],
        ),
        ('ape(prompt.system="", wide=true)', [Spec("ape", {"prompt.system": "", "wide": True})]),
    ],
)
def test_specs(text, found):
    assert parse_specs(text) == found


@pytest.mark.parametrize("text", ["", " , ", "pced(gamma=1", "pced)", "pced(gamma)", 'x(a="b)', "x(a=1, a=2)", "a b"])
def test_what_is_no_spec_is_quoted(text):
    with pytest.raises(UsageError) as raised:
        parse_specs(text)
    assert repr(text)[1:-1].strip() in str(raised.value)


VALUES = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.text())


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), VALUES, max_size=4))
def test_a_spec_is_read_as_it_is_shown(options):
    assert parse_specs(f"x,{Spec('engine', options)}")[1] == Spec("engine", options)


def test_both_forms_of_a_line_are_read_and_other_keys_ignored(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text(
        '\ufeff{"question": " Who? ", "answer": "Mira Oskel", "hops": 1}\n\n'
        '{"question": "When?", "answers": ["1907", 1908]}\n{"question": "Why?"}\n',
        encoding="utf-8",
    )
    assert read_questions(path) == [
        GoldenQuestion(text="Who?", answers=("Mira Oskel",)),
        GoldenQuestion(text="When?", answers=("1907", "1908")),
        GoldenQuestion(text="Why?"),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"question": "Who?"}\n{"question": ', "line 2: not valid JSON"),
        ('["Who?"]', "line 1: a line is an object"),
        ('{"question": "  "}', 'with a "question" that is not empty'),
        ('{"question": 3}', 'with a "question"'),
        ('{"question": "Who?", "answer": {"a": 1}}', '"answers" a list of texts'),
        ('{"question": "Who?", "answers": "Mira"}', '"answers" a list of texts'),
        ('{"question": "Who?", "answer": "a", "answers": ["b"]}', "not both"),
        ('{"question": "Who?", "answers": [" "]}', "an answer is empty"),
        ("\n\n", "holds no question"),
        (None, "No such file"),
        (b"\xff\xfe\x00", "in UTF-8"),
    ],
)
def test_a_bad_file_is_one_sentence_with_the_line(tmp_path, text, says):
    path = tmp_path / "q.jsonl"
    if isinstance(text, bytes):
        path.write_bytes(text)
    elif text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=str(path)) as error:
        read_questions(path)
    assert says in str(error.value)


def test_an_answer_is_right_if_it_contains_a_gold_one_where_there_are_any():
    assert GoldenQuestion(text="Who?", answers=("Bolt", "ann LEE")).right("It was  Ann\nLee.") is True
    assert GoldenQuestion(text="Who?").right("Mira") is None
    assert GoldenQuestion(text="Who?", answers=("Ann",)).right("Mira") is False


def test_made_questions_are_beginnings_of_sentences_of_the_index(rag):
    drawn = made_questions(rag.store, 4, seed=1)
    assert drawn == made_questions(rag.store, 4, seed=1)
    assert len({question.text for question in drawn}) == len(drawn) == 4
    texts = " ".join(chunk.text for chunk in rag.store.chunks())
    for question in drawn:
        beginning = question.text.split('"')[1].removesuffix("…")
        assert len(beginning) > 8
        assert beginning in texts
        assert question.answers == ()
    assert len(made_questions(rag.store, 100, seed=1)) == 6  # the number of sentences
