"""Files of BEIR and of the user become tasks."""

import json
from pathlib import Path

import pytest
from benchmarkfolder import QUESTIONS, beir_folder, write_lines

from ragkv.benchmarks.evaluation.files import (
    load_task,
    read_benchmark,
)
from ragkv.benchmarks.evaluation.metrics import score
from ragkv.errors import ConfigError, RagkvError, RetrievalError, UsageError

OWN = {"question": "Who founded Halden Works?", "chunks": ["Bolt.", "Mira Oskel did."], "answers": ["Mira Oskel"]}


def test_own_file(tmp_path):
    path = tmp_path / "mine.jsonl"
    more = {"id": "b", "kind": "one hop", "needed": [1], "classes": ["x", "y"], "other": 1}
    write_lines(path, [OWN, OWN | more, {"question": "Year?", "chunks": ["In 1907."], "answer": 1907}])
    task = load_task(path)
    assert (task.name, task.metric, task.seed) == ("mine", "contains", None)
    assert [example.example_id for example in task.examples] == ["1", "b", "3"]
    first, second, third = task.examples
    assert (first.question, first.chunks, first.answers) == (OWN["question"], tuple(OWN["chunks"]), ("Mira Oskel",))
    assert (second.kind, second.needed, second.classes) == ("one hop", (1,), ("x", "y"))
    assert third.answers == ("1907",)
    assert score(task.metric, "Mira oskel, it seems", first) == 1.0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"mine.jsonl, line 2: not valid JSON"),
        ("[1]", r"line 2: a line is an object"),
        (OWN | {"question": ""}, r'line 2: a line is an object with a "question"'),
        (OWN | {"chunks": []}, r'line 2: "chunks" must be a list of texts that is not empty'),
        (OWN | {"chunks": [" "]}, r'line 2: a text of "chunks" is blank'),
        (OWN | {"answers": []}, r'line 2: "answers" is missing'),
        (OWN | {"answer": "x"}, r'line 2: give "answer" or "answers", not both'),
        (OWN | {"needed": [2]}, r'line 2: "needed" must be a list of places in "chunks", from 0 to 1'),
        (OWN | {"needed": [True]}, r'line 2: "needed" must be'),
        (OWN | {"kind": 3}, r'line 2: "kind" must be a text'),
        (OWN | {"id": "1"}, r"line 2: the id '1' occurs twice"),
    ],
)
def test_bad_own_lines(tmp_path, line, message):
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps(OWN) + "\n" + (line if isinstance(line, str) else json.dumps(line)) + "\n")
    with pytest.raises(ConfigError, match=message):
        load_task(path)


def test_a_limit_draws_by_seed_in_the_order_of_the_file(tmp_path):
    write_lines(tmp_path / "mine.jsonl", [OWN] * 40)
    draws = []
    for seed in range(20):
        task = load_task(tmp_path / "mine.jsonl", limit=10, seed=seed)
        assert task.seed == seed
        draws.append([int(example.example_id) for example in task.examples])
    assert all(len(set(ids)) == 10 and ids == sorted(ids) for ids in draws)
    assert len({tuple(ids) for ids in draws}) == 20
    assert {number for ids in draws for number in ids} == set(range(1, 41))  # every one is drawn sometimes
    again = load_task(tmp_path / "mine.jsonl", limit=10, seed=7)
    assert [int(example.example_id) for example in again.examples] == draws[7]
    assert len(load_task(tmp_path / "mine.jsonl", limit=99).examples) == 40


def test_questions_without_a_relevant_passage_are_counted(tmp_path):
    folder = beir_folder(tmp_path / "b")
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td2\t1\nq2\td3\t0\nq3\td4\t-1\n")
    task = read_benchmark(folder)
    assert (len(task.judgements), list(task.unjudged)) == (1, ["q2", "q3"])


def test_a_judged_passage_that_is_not_in_the_corpus_stays_relevant_and_is_counted(tmp_path):
    folder = beir_folder(tmp_path / "b")
    with (folder / "qrels" / "test.tsv").open("a") as file:
        file.write("q1\tgone\t1\n")
    task = read_benchmark(folder)
    assert task.judgements[0].relevant == {"d2": 1, "gone": 1}
    assert list(task.notes) == ["1 relevant passages are not in the corpus and count as not found"]


def test_a_question_that_is_in_the_corpus_is_excluded_from_its_own_answers(tmp_path):
    folder = beir_folder(tmp_path / "arguana")
    with (folder / "corpus.jsonl").open("a") as file:
        file.write(json.dumps({"_id": "q1", "text": QUESTIONS["q1"]}) + "\n")
    found = {judgement.question_id: judgement.excluded for judgement in read_benchmark(folder).judgements}
    assert found == {"q1": "q1", "q2": None, "q3": None}


def test_a_header_may_be_missing(tmp_path):
    folder = beir_folder(tmp_path)
    (folder / "qrels" / "test.tsv").write_text("q1\td2\t1\r\nq2\td3\t1\r\n")
    assert len(read_benchmark(folder).judgements) == 2


def test_a_sample_keeps_order_and_corpus(tmp_path):
    task = read_benchmark(beir_folder(tmp_path))
    small = task.sample(2, 5)
    assert [judgement.question_id for judgement in small.judgements] in (["q1", "q2"], ["q1", "q3"], ["q2", "q3"])
    assert small == task.sample(2, 5)
    assert small.passages == task.passages
    assert list(small.notes) == ["2 of 3 judged questions, drawn by seed 5"]
    assert task.sample(None, 0) is task.sample(3, 0) is task


def _replace(name: str, text: str | bytes | None):
    def spoil(folder: Path) -> None:
        beir_folder(folder)
        if text is None:
            (folder / name).unlink()
        elif isinstance(text, bytes):
            (folder / name).write_bytes(text)
        else:
            (folder / name).write_text(text)

    return spoil


HEADER = "query-id\tcorpus-id\tscore\n"


@pytest.mark.parametrize(
    ("spoil", "error", "says"),
    [
        (lambda folder: None, UsageError, "not a folder"),
        (_replace("corpus.jsonl", None), ConfigError, "No such file"),
        (_replace("corpus.jsonl", "\n"), ConfigError, "holds no passage"),
        (_replace("corpus.jsonl", b"\xff\xfe"), ConfigError, "in UTF-8"),
        (_replace("corpus.jsonl", '{"_id": "a", "text": "x"}\n{"_id": '), ConfigError, "line 2: not valid JSON"),
        (_replace("corpus.jsonl", "[1]"), ConfigError, "line 1: a line is an object"),
        (_replace("corpus.jsonl", '{"text": "x"}'), ConfigError, 'line 1: "_id" must be an id'),
        (_replace("corpus.jsonl", '{"_id": "a", "text": 3}'), ConfigError, 'line 1: "text" must be a text'),
        (
            _replace("corpus.jsonl", '{"_id": 1, "text": ""}\n\n{"_id": "1", "text": ""}'),
            ConfigError,
            "line 3: the _id '1' occurs twice",
        ),
        (_replace("queries.jsonl", None), ConfigError, "No such file"),
        (_replace("queries.jsonl", ""), ConfigError, "has no query 'q1'"),
        (_replace("queries.jsonl", '{"_id": "q1"}'), ConfigError, '"text" must be a text'),
        (
            _replace("queries.jsonl", '{"_id": "q1", "text": "a"}\n{"_id": "q1", "text": "b"}'),
            ConfigError,
            "line 2: the _id 'q1' occurs twice",
        ),
        (_replace("qrels/test.tsv", None), ConfigError, "No such file"),
        (_replace("qrels/test.tsv", ""), RetrievalError, "No question of"),
        (_replace("qrels/test.tsv", HEADER), RetrievalError, "No question of"),
        (_replace("qrels/test.tsv", HEADER + "q1\td2\t0\n"), RetrievalError, "No question of"),
        (_replace("qrels/test.tsv", HEADER + "q1\td2\n"), ConfigError, "line 2: a line is query-id"),
        (_replace("qrels/test.tsv", HEADER + "q1\td2\tmuch\n"), ConfigError, "line 2: a line is query-id"),
        (_replace("qrels/test.tsv", HEADER + "q1\td2\tnan\n"), ConfigError, "line 2: a line is query-id"),
        (_replace("qrels/test.tsv", "q1 0 d2 1\n"), ConfigError, "line 1: a line is query-id"),
        (_replace("qrels/test.tsv", HEADER + "q1\td2\t1\nq9\td2\t1\n"), ConfigError, "line 3: .* has no query 'q9'"),
    ],
)
def test_what_is_wrong_is_one_sentence_that_names_the_file(tmp_path, spoil, error, says):
    folder = tmp_path / "set"
    spoil(folder)
    with pytest.raises(RagkvError, match=says) as caught:
        read_benchmark(folder)
    assert type(caught.value) is error
    assert str(folder) in str(caught.value)


def test_another_split_is_named_where_there_is_one(tmp_path):
    folder = beir_folder(tmp_path)
    (folder / "qrels" / "test.tsv").rename(folder / "qrels" / "dev.tsv")
    with pytest.raises(ConfigError, match="choose --split dev"):
        read_benchmark(folder)
    assert len(read_benchmark(folder, split="dev").judgements) == 3
