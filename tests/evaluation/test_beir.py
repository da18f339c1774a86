"""Benchmarks of BEIR and LOFT are read as they are, and their errors name file and line."""

import json
from pathlib import Path

import pytest
from benchmarkfolder import QUESTIONS, beir_folder, loft_folder, write_lines

from ragkv.errors import ConfigError, RagkvError, RetrievalError, UsageError
from ragkv.evaluation.tasks.files import read_benchmark

RELEVANT = {"q1": {"d2": 1}, "q2": {"d3": 2, "d1": 1}, "q3": {"d4": 1}}


@pytest.mark.parametrize("make", [beir_folder, loft_folder])
def test_both_layouts_say_the_same(tmp_path, make):
    task = read_benchmark(make(tmp_path / "tarn"))
    assert {judgement.question_id: judgement.relevant for judgement in task.judgements} == RELEVANT
    assert {judgement.question_id: judgement.question for judgement in task.judgements} == QUESTIONS
    assert [passage.passage_id for passage in task.passages] == ["d1", "d2", "d3", "d4"]
    assert task.passages[0].text == "Halden Works Halden Works makes wall clocks in Tarn."
    assert task.passages[2].text == "Corvo Mills sells flour in Tarn and in Varn."  # no title, no blank before it
    assert (list(task.unjudged), list(task.notes)) == ([], [])
    assert all(judgement.excluded is None for judgement in task.judgements)


def test_the_task_is_named_by_its_folder(tmp_path):
    assert read_benchmark(beir_folder(tmp_path / "scifact")).name == "beir/scifact"
    assert read_benchmark(loft_folder(tmp_path / "nq" / "128k")).name == "loft/nq/128k"


@pytest.mark.parametrize("name", ["test_queries.jsonl", "test.jsonl", "dev_queries.jsonl", "dev.jsonl"])
def test_loft_s_test_questions_come_first_then_dev(tmp_path, name):
    assert len(read_benchmark(loft_folder(tmp_path / "nq", name)).judgements) == 3
    loft_folder(tmp_path / "both")
    write_lines(tmp_path / "both" / "dev_queries.jsonl", [{"qid": "x", "query_text": "Why?", "answers": [["d1", 1]]}])
    assert len(read_benchmark(tmp_path / "both").judgements) == 3
    assert len(read_benchmark(tmp_path / "both", split="dev").judgements) == 1


def test_loft_s_rag_tasks_have_their_passages_in_the_metadata(tmp_path):
    loft_folder(tmp_path)
    row = {"qid": 7, "query_text": "Who?", "answers": ["Mira"], "metadata": {"qrels": [["d1", 1.0], ["d3", 0]]}}
    write_lines(tmp_path / "test_queries.jsonl", [row])
    [judgement] = read_benchmark(tmp_path).judgements
    assert (judgement.question_id, judgement.relevant) == ("7", {"d1": 1})


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


def _replace(name: str, text: str | bytes | None, make=beir_folder):
    def spoil(folder: Path) -> None:
        make(folder)
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
        (lambda folder: folder.mkdir(), UsageError, "looks like no benchmark"),
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
        (_replace("corpus.jsonl", '{"_id": "a", "text": "x"}', loft_folder), ConfigError, '"pid" must be an id'),
        (_replace("test_queries.jsonl", "", loft_folder), ConfigError, "holds no question"),
        (_replace("test_queries.jsonl", '{"qid": "a"}', loft_folder), ConfigError, '"query_text" must be a text'),
        (
            _replace("test_queries.jsonl", '{"qid": "a", "query_text": "x", "answers": ["Mira"]}', loft_folder),
            ConfigError,
            r'line 1: "answers" .* must be a list of \[pid, score\]',
        ),
        (
            _replace("test_queries.jsonl", '{"qid": "a", "query_text": "x", "answers": []}\n' * 2, loft_folder),
            ConfigError,
            "line 2: the qid 'a' occurs twice",
        ),
        (
            _replace("test_queries.jsonl", '{"qid": "a", "query_text": "x", "answers": []}\n', loft_folder),
            RetrievalError,
            "No question of",
        ),
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


def test_the_layout_can_be_said_and_must_be_known(tmp_path):
    folder = beir_folder(tmp_path)
    loft_folder(folder)  # both lie here, and the corpus is LOFT's
    assert len(read_benchmark(folder, layout="loft").judgements) == 3
    with pytest.raises(ConfigError, match='"_id" must be an id'):
        read_benchmark(folder)
    with pytest.raises(UsageError, match="one of beir, loft"):
        read_benchmark(folder, layout="trec")
