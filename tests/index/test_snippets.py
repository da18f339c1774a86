"""Which sentences of a passage are shown and marked for a question and its answer."""

import random

import pytest

from ragkv.index.snippets import MAX_CHARS, snippets

LOREM = "lorem ipsum dolor sit amet, consectetur " * 30
TABLE = "## Concerts\n\n| Day | Place | |\n|---|:-:|---|\n| Friday | **Church** of [São Telmo](http://x) | 20:30 |\n"
TABLE += "| Saturday | Fish \\| market | |\n\nLong black."


def snippet(text, question, answer="", weights=None):
    [result] = snippets([text], question, answer, lambda words: weights or {})
    return result.text, [text[start:end] for start, end in result.highlights]


@pytest.mark.parametrize(
    ("text", "question", "shown", "marked"),
    [
        ("# Fees\n\nA ticket costs £18. *It's* sold at the inn.", "Where is it sold?", "It's sold at the inn.", None),
        (TABLE, "Who plays at São Telmo?", "Day: Friday; Place: Church of São Telmo; 20:30", None),
        (TABLE, "the concert on Saturday", "Day: Saturday; Place: Fish | market", None),
        ("| Friday | Church |\n| Sunday | Cathedral |", "the cathedral", "Sunday; Cathedral", None),
        ("Day: Friday\nPlace: Church\nTime: 20:30", "Which church?", "Day: Friday; Place: Church; Time: 20:30", None),
        (
            "1. Open it.\n2. Press the button until the\n   light goes out.",
            "the light",
            "Press the button until the light goes out.",
            None,
        ),
        (
            "> said by one who was there and saw all of it and\n> the moon\n\nElse.",
            "moon",
            "said by one who was there and saw all of it and the moon",
            None,
        ),
        ("- apples\n- plums\n", "plums", "plums", ["plums"]),
        (
            "How many are there? Seven. One was dropped.",
            "How many are there?",
            "How many are there? Seven. One was dropped.",
            ["How many are there?"],
        ),
        (
            "Who was it? " + "Nobody whom anybody knew. " * 20 + "It was Dr. J. Brown of the e.g. river.",
            "Brown",
            "It was Dr. J. Brown of the e.g. river.",
            None,
        ),
        (
            "```python\ndef load(path):\n    return a*b*c\n```\n",
            "what does load do",
            "def load(path): return a*b*c",
            ["def load(path):"],
        ),
        (
            "def f(x):\n    return x\n\ndef save(my_data_x):\n    write(my_data_x)",
            "save",
            "def save(my_data_x): write(my_data_x)",
            ["def save(my_data_x):"],
        ),
        (
            "東京は日本の首都です。人口は約1400万人です。大阪は西にあります。",
            "人口",
            "人口は約1400万人です。大阪は西にあります。",
            ["人口は約1400万人です。"],
        ),
        ("दिल्ली राजधानी है। मुंबई तट पर है।", "मुंबई", "मुंबई तट पर है।", None),
        ("Dogs bark. It is late.", "quantum physics", "Dogs bark. It is late.", []),
        ("# Only a heading", "nothing", "Only a heading", []),
        ("\x1b[31mred\x1b[0m text. Blue.", "text", "\x1b[31mred\x1b[0m text. Blue.", ["\x1b[31mred\x1b[0m text."]),
        *((blank, "anything", "", []) for blank in ("", " \n\n", "|---|---|", "---", "```\n```")),
    ],
)
def test_the_best_sentences_are_shown_in_plain_text(text, question, shown, marked):
    line, spans = snippet(text, question)
    assert line == shown
    if marked is not None:
        assert spans == marked
    else:
        assert len(spans) == 1


def test_an_answers_words_say_which_sentence_it_stands_on():
    text = "Linodyne Paper is a company in Kesk. It makes Ranatix. It employs 360 people."
    question = "How many people work at Linodyne Paper in Kesk?"
    assert snippet(text, question)[1][0] == "Linodyne Paper is a company in Kesk."
    assert snippet(text, question, "360 employees")[1] == [
        "Linodyne Paper is a company in Kesk.",
        "It employs 360 people.",
    ]
    assert snippet(text, "What does it make?", "Ranatix")[1] == ["It makes Ranatix."]
    # a refusal stands on nothing
    assert snippet(text, question, "The documents do not say.") == snippet(text, question)


def test_words_count_by_the_weights_of_the_index():
    text = "The pike is old. The perch is new."
    assert snippet(text, "pike perch", weights={"pike": 5.0, "perch": 1.0})[1] == ["The pike is old."]
    assert snippet(text, "pike perch", weights={"pike": 1.0, "perch": 5.0})[1] == ["The perch is new."]
    # what only frequent words of the question connect is not marked
    assert snippet(text, "the quarks", weights={"the": 0.1, "quarks": 5.0})[1] == []


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (LOREM + "the zebra crossed at noon " + LOREM, "zebra"),
        ("x" * 3000 + " zebra " + "y" * 3000, "zebra"),
        ("กรุงเทพมหานคร " * 40 + "ภูเก็ตเป็นเกาะ " + "กรุงเทพมหานคร " * 40, "ภูเก็ต"),
    ],
)
def test_a_long_sentence_is_cut_around_the_words(text, word):
    line, [marked] = snippet(text, word)
    assert word in marked
    assert len(marked) <= MAX_CHARS
    assert line == f"… {marked} …"


def test_spans_are_in_order_and_within_the_text_whatever_it_is():
    rng = random.Random(5)
    parts = [
        "| a | b |\n",
        "|---|\n",
        "# ",
        "- ",
        "> ",
        "```\n",
        "fish. ",
        "Fish",
        "key: fish\n",
        "\n",
        " ",
        "魚。",
        "*",
        "[",
        "](",
        "\ud800",
        "\r",
    ]
    for _ in range(300):
        text = "".join(rng.choices(parts, k=rng.randrange(40)))
        [(line, spans)] = snippets([text], "fish key b 魚", rng.choice(["", "a fish"]), lambda words: {})
        edges = [edge for span in spans for edge in span]
        assert edges == sorted(edges)
        assert all(text[start:end].strip() for start, end in spans)
        assert "\n" not in line
        assert len(line) <= 3 * MAX_CHARS


@pytest.mark.parametrize(
    "text", ["|", "*", "[", "a\n", "- ", "> ", "a: b\n", "|a|\n", "[](", "<a ", "**a ", "Dr.", "a. "]
)
def test_hostile_text_is_read_in_bounded_time(text):
    snippets([text * 50_000] * 4, "what a is", "b", lambda words: {})
