"""Files of LOFT, LongBench, RULER, BEIR and the user become tasks; long texts are split without loss."""

import json
import logging
import re
from pathlib import Path

import pytest
from benchmarkfolder import QUESTIONS, beir_folder, loft_folder, write_lines
from hypothesis import given
from hypothesis import strategies as st

from ragkv.benchmarks.evaluation.tasks.files import (
    LONGBENCH,
    RULER,
    Cutter,
    estimated_tokens,
    load_tasks,
    read_benchmark,
)
from ragkv.doctor.metrics import METRICS, score
from ragkv.errors import ConfigError, RagkvError, RetrievalError, UsageError


def words(text: str) -> int:
    return len(text.split())


OWN = {"question": "Who founded Halden Works?", "chunks": ["Bolt.", "Mira Oskel did."], "answers": ["Mira Oskel"]}


def test_own_file(tmp_path):
    path = tmp_path / "mine.jsonl"
    more = {"id": "b", "kind": "one hop", "needed": [1], "classes": ["x", "y"], "other": 1}
    write_lines(path, [OWN, OWN | more, {"question": "Year?", "chunks": ["In 1907."], "answer": 1907}])
    [task] = load_tasks(path)
    assert (task.name, task.metric, task.seed) == ("mine", "contains", None)
    assert [example.example_id for example in task.examples] == ["1", "b", "3"]
    first, second, third = task.examples
    assert (first.question, first.chunks, first.answers) == (OWN["question"], tuple(OWN["chunks"]), ("Mira Oskel",))
    assert (second.kind, second.needed, second.classes) == ("one hop", (1,), ("x", "y"))
    assert third.answers == ("1907",)
    assert score(task.metric, "Mira oskel, it seems", first) == 1.0


LOFT_TEXTS = [f"Fact {i} about Tarn." for i in range(20)]


def loft_task(folder: Path, split: str = "dev", **fields: object) -> Path:
    corpus = [{"pid": f"p{i}", "title_text": "", "passage_text": text} for i, text in enumerate(LOFT_TEXTS)]
    write_lines(folder / "corpus.jsonl", corpus)
    row = {"query_text": " What? ", "metadata": {"qrels": [["p3", 1], ["p7", 1], ["p5", 0]]}, "answers": ["Tarn", "Ur"]}
    write_lines(folder / f"{split}_queries.jsonl", [row | {"qid": f"q{i}"} | fields for i in range(6)])
    return folder


def test_loft_folder(tmp_path):
    [task] = load_tasks(loft_task(tmp_path / "nq" / "32k"), chunks=5, seed=3)
    assert (task.name, task.metric, task.seed) == ("loft/nq/32k", "subspan_em", 3)
    assert len(task.examples) == 6
    for example in task.examples:
        assert len(set(example.chunks)) == 5
        assert {example.chunks[i] for i in example.needed} == {LOFT_TEXTS[3], LOFT_TEXTS[7]}
        assert (example.question, example.answers) == ("What?", ("Tarn", "Ur"))
    assert len({example.chunks for example in task.examples}) > 1  # each question has its own sample and order
    assert len({example.needed for example in task.examples}) > 1


def test_a_loft_question_has_the_same_chunks_whichever_others_are_asked(tmp_path):
    folder = loft_task(tmp_path / "nq" / "32k")
    [every], [few], [other] = (load_tasks(folder, seed=3, chunks=5, limit=n) for n in (None, 2, 4))
    by_id = {example.example_id: example for example in every.examples}
    assert len(few.examples) == 2
    assert all(by_id[example.example_id] == example for task in (few, other) for example in task.examples)
    assert load_tasks(folder, seed=4, chunks=5)[0].examples != every.examples


def test_a_loft_corpus_that_is_small_is_given_whole_and_gold_passages_always(tmp_path):
    folder = loft_task(tmp_path / "quest" / "128k", split="test")
    [whole] = load_tasks(folder, chunks=99)
    assert (whole.metric, whole.max_new_tokens) == ("loft_multi", 256)
    assert all(sorted(example.chunks) == sorted(LOFT_TEXTS) for example in whole.examples)
    [gold] = load_tasks(folder, chunks=1)
    assert all(example.needed == (0, 1) and len(example.chunks) == 2 for example in gold.examples)


def test_loft_splits(tmp_path):
    folder = loft_task(loft_task(tmp_path / "nq"), split="few_shot", answers=["Ur"])
    assert load_tasks(folder)[0].examples[0].answers == ("Tarn", "Ur")
    assert load_tasks(folder, split="few_shot")[0].examples[0].answers == ("Ur",)
    with pytest.raises(ConfigError, match=r"No such file: .*best_queries.jsonl"):
        load_tasks(folder, split="best")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"answers": [["p3", 1]]},
            r"line 1: \"answers\" holds lists, .*`python -m .* retrieval`",
        ),
        ({"answers": []}, r"line 1: \"answers\" must be a list of texts that is not empty"),
        ({"answers": ["Ur", " "]}, r"line 1: a text of \"answers\" is blank"),
        ({"metadata": {}}, r"line 1: .*metadata.qrels"),
        ({"metadata": {"qrels": [["p99", 1]]}}, r"line 1: .*names the passage 'p99', which corpus.jsonl does not have"),
        ({"metadata": {"qrels": [["p3", 0]]}}, r"line 1: .*names no passage with a score above 0"),
        ({"query_text": " "}, r"line 1: the question is blank"),
        ({"qid": "same"}, r"line 2: the id 'same' occurs twice"),
    ],
)
def test_bad_loft_lines(tmp_path, fields, message):
    with pytest.raises(ConfigError, match=message):
        load_tasks(loft_task(tmp_path / "nq", **fields))


def long_row(data_set: str, context: str, **fields: object) -> dict[str, object]:
    row = {"input": "Who?", "context": context, "answers": ["Ann"], "length": 9, "dataset": data_set, "language": "en"}
    return row | {"all_classes": None, "_id": "a1"} | fields


PASSAGES = "Passage 1:\nHalden\nText of one.\n\nMore Passage 9: of it.\nPassage 2:\nBolt\nText of two."


def test_longbench_passages_are_whole(tmp_path):
    write_lines(tmp_path / "hotpotqa.jsonl", [long_row("hotpotqa", PASSAGES), long_row("hotpotqa", PASSAGES, _id="a2")])
    [task] = load_tasks(tmp_path / "hotpotqa.jsonl", chunk_tokens=1, count_tokens=words)
    assert (task.name, task.metric, task.max_new_tokens) == ("longbench/hotpotqa", "qa_f1", 32)
    [first, second] = task.examples
    assert first.chunks == (
        "Passage 1:\nHalden\nText of one.\n\nMore Passage 9: of it.",
        "Passage 2:\nBolt\nText of two.",
    )
    assert first.question.startswith("Who?\n")
    assert (first.example_id, second.example_id, first.answers, first.kind) == ("a1", "a2", ("Ann",), "")


def test_longbench_prose_is_cut_at_paragraphs_by_size(tmp_path):
    paragraphs = [f"Paragraph {name} has exactly six words." for name in ("one", "two", "three", "four")]
    write_lines(tmp_path / "qasper.jsonl", [long_row("qasper", "\n\n".join(paragraphs))])
    for size, expected in ((6, 4), (12, 2), (99, 1)):
        [example] = load_tasks(tmp_path / "qasper.jsonl", chunk_tokens=size, count_tokens=words)[0].examples
        assert len(example.chunks) == expected
        assert " ".join(" ".join(example.chunks).split()) == " ".join(paragraphs)


def test_longbench_worked_examples_share_chunks_but_are_not_cut(tmp_path):
    shots = "".join(f"Question: What is number {i} ?\nType: Date\n" for i in range(4))  # 8 words each
    row = long_row("trec", shots, input="Question: Where?\nType:", answers=["Place"], all_classes=["Date", "Place"])
    write_lines(tmp_path / "trec.jsonl", [row])
    [task] = load_tasks(tmp_path / "trec.jsonl", chunk_tokens=16, count_tokens=words)
    [example] = task.examples
    assert [chunk.count("Question:") for chunk in example.chunks] == [2, 2]
    assert all(chunk.startswith("Question:") and chunk.endswith("Date") for chunk in example.chunks)
    assert example.question.endswith("Question: Where?\nType:")
    assert score(task.metric, "\nPlace\nQuestion: Date", example) == 1.0


def test_longbench_code_keeps_its_lines(tmp_path):
    code = "def f(x):\n    if x:\n        return 1\n    return 2\n"
    write_lines(tmp_path / "lcc.jsonl", [long_row("lcc", code, input="", answers=["f(1)"])])
    [task] = load_tasks(tmp_path / "lcc.jsonl", chunk_tokens=4, count_tokens=words)
    [example] = task.examples
    assert "".join(example.chunks) == code
    assert len(example.chunks) > 1
    assert (task.metric, example.question[:5]) == ("code_sim", "Write")


def test_longbench_retrieval_knows_its_paragraph(tmp_path):
    text = "Paragraph 1: The sea.\n\nParagraph 2: The hills.\n\nParagraph 3: The moor."
    write_lines(tmp_path / "p.jsonl", [long_row("passage_retrieval_en", text, answers=["Paragraph 2"])])
    [task] = load_tasks(tmp_path / "p.jsonl")
    assert (task.metric, task.examples[0].needed) == ("retrieval", (1,))
    chinese = long_row("passage_retrieval_zh", "段落1：海。\n段落2：山。", answers=["段落1"], language="zh")
    write_lines(tmp_path / "z.jsonl", [chinese])
    assert load_tasks(tmp_path / "z.jsonl")[0].examples[0].needed == (0,)
    write_lines(tmp_path / "p.jsonl", [long_row("passage_retrieval_en", text, answers=["2"])])
    with pytest.raises(ConfigError, match=r"p\.jsonl, line 1: an answer must be as .Paragraph 7., not '2'"):
        load_tasks(tmp_path / "p.jsonl")


def test_longbench_e_has_its_classes_of_length(tmp_path):
    sizes = {"a": 3999, "b": 4000, "c": 8000}
    write_lines(tmp_path / "qasper_e.jsonl", [long_row("qasper", "x", length=n, _id=i) for i, n in sizes.items()])
    [task] = load_tasks(tmp_path / "qasper_e.jsonl")
    assert task.name == "longbench/qasper_e"
    assert [example.kind for example in task.examples] == ["0-4k", "4-8k", "8k+"]


def test_longbench_sets_without_a_metric_here(tmp_path, caplog):
    write_lines(tmp_path / "data" / "vcsum.jsonl", [long_row("vcsum", "会议。")])
    write_lines(tmp_path / "data" / "qasper.jsonl", [long_row("qasper", "x")])
    with pytest.raises(ConfigError, match="longbench/vcsum is judged by Chinese words"):
        load_tasks(tmp_path / "data" / "vcsum.jsonl")
    assert load_tasks(tmp_path / "data" / "vcsum.jsonl", metric="rouge_l")[0].metric == "rouge_l"
    with caplog.at_level(logging.WARNING):
        assert [task.name for task in load_tasks(tmp_path / "data")] == ["longbench/qasper"]
    assert "longbench/vcsum is left out" in caplog.text


def test_every_data_set_of_longbench_has_a_metric_that_exists():
    assert len(LONGBENCH) == 21
    assert {name for name, made in LONGBENCH.items() if made.metric is None} == {"multifieldqa_zh", "dureader", "vcsum"}
    assert {made.metric for made in LONGBENCH.values()} - {None} <= set(METRICS)
    ends = ("classification", "_first_line")
    first_line = {name for name, made in LONGBENCH.items() if made.metric and made.metric.endswith(ends)}
    assert first_line == {"trec", "triviaqa", "samsum", "lsht"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dataset": "squad"}, r"line 1: 'squad' is no data set of LongBench v1"),
        ({"context": None}, r'line 1: "context" must be a text'),
        ({"context": "  "}, r"line 1: there is no text to read"),
        ({"answers": "Ann"}, r'line 1: "answers" must be a list of texts'),
        ({"_id": ""}, r'line 1: "_id" must be an id'),
        ({"dataset": "trec"}, r'line 1: "all_classes" must be a list of texts'),
    ],
)
def test_bad_longbench_lines(tmp_path, fields, message):
    write_lines(tmp_path / "qasper.jsonl", [long_row("qasper", "Some text.") | fields])
    with pytest.raises(ConfigError, match=message):
        load_tasks(tmp_path / "qasper.jsonl", format="longbench")


NIAH_HEAD = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.\n"
)
NIAH_ASK = "What is the special magic number for odd-hill mentioned in the provided text?"
GRASS = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic numbers for odd-hill is: 5437923."
VT_HEAD = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
VT_ASK = "Question: Find all variables that are assigned the value {} in the text above."
CWE_HEAD = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
CWE_ASK = "Question: What are the 10 most common words in the above list?"
FWE_HEAD = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. "
)
FWE_ASK = (
    "Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
)
QA_ASK = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
)
QA_HEAD = QA_ASK + "The following are given documents.\n\n"


def ruler_row(text: str, outputs: list[str], prefix: str = "", index: int = 5) -> dict[str, object]:
    return {"index": index, "input": text, "outputs": outputs, "length": 100, "answer_prefix": prefix}


def test_ruler_needle(tmp_path):
    lines = [GRASS, GRASS, NEEDLE, GRASS]
    row = ruler_row(NIAH_HEAD + "\n".join(lines) + "\n" + NIAH_ASK, ["5437923"], " The special magic number for it is")
    path = tmp_path / "niah_single_1" / "validation.jsonl"
    write_lines(path, [row, row])  # `index` is the answer's position there, the same in both
    [task] = load_tasks(path, chunk_tokens=20, count_tokens=words)
    assert (task.name, task.metric, task.max_new_tokens) == ("ruler/niah_single_1", "string_match_all", 128)
    assert [example.example_id for example in task.examples] == ["1", "2"]
    example = task.examples[0]
    assert " ".join(" ".join(example.chunks).split()) == " ".join(lines)
    assert [NEEDLE in example.chunks[i] for i in example.needed] == [True]
    assert example.question == NIAH_ASK + " The special magic number for it is"
    assert score(task.metric, "it is 5437923.", example) == 1.0


def test_ruler_variables_keep_their_worked_example_in_the_question(tmp_path):
    shot = VT_HEAD + GRASS + "\nVAR ABC = 12345\n" + VT_ASK.format(12345) + " Answer: they are: ABC"
    haystack = f"{GRASS}\nVAR QWERT = 54321\n{GRASS}\nVAR ZXCVB = VAR QWERT\n"
    row = ruler_row(
        shot + "\n\n" + VT_HEAD + haystack + VT_ASK.format(54321), ["QWERT", "ZXCVB"], " Answer: they are: "
    )
    write_lines(tmp_path / "vt.jsonl", [row])
    [task] = load_tasks(tmp_path / "vt.jsonl", chunk_tokens=18, count_tokens=words)
    [example] = task.examples
    assert example.question == f"{shot}\n\n{VT_ASK.format(54321)} Answer: they are:"
    assert "".join(" ".join(example.chunks).split()) == "".join(haystack.split())
    assert {i for i, chunk in enumerate(example.chunks) if "VAR" in chunk} == set(example.needed)
    assert score(task.metric, "QWERT", example) == 0.5


@pytest.mark.parametrize(
    ("name", "head", "haystack", "ask", "metric"),
    [
        ("cwe", CWE_HEAD, "1. ship 2. sail 3. ship", CWE_ASK, "string_match_all"),
        ("fwe", FWE_HEAD, "gkltq ... xzaq .... gkltq", FWE_ASK, "string_match_all"),
    ],
)
def test_ruler_words(tmp_path, name, head, haystack, ask, metric):
    write_lines(tmp_path / f"{name}.jsonl", [ruler_row(f"{head}{haystack}\n{ask}", ["ship"], " Answer:")])
    [task] = load_tasks(tmp_path / f"{name}.jsonl")
    assert (task.name, task.metric) == (f"ruler/{name}", metric)
    [example] = task.examples
    assert (example.chunks, example.question, example.needed) == ((haystack,), f"{ask} Answer:", ())


@pytest.mark.parametrize("flat", [False, True])
def test_ruler_questions(tmp_path, flat):
    documents = ["Document 1:\nHalden\nIt was Ann.", "Document 2:\nBolt makes valves."]
    text = QA_HEAD + "\n\n".join(documents) + "\n\n" + QA_ASK + "Question: Who?"
    if flat:  # prepare.py --remove_newline_tab
        text = " ".join(text.split())
    write_lines(tmp_path / "qa_1.jsonl", [ruler_row(text, ["Ann", "Ann Lee"], " Answer:")])
    [task] = load_tasks(tmp_path / "qa_1.jsonl")
    assert (task.metric, task.max_new_tokens) == ("string_match_part", 32)
    [example] = task.examples
    assert example.chunks == ((" ".join(" ".join(documents).split()),) if flat else tuple(documents))
    assert example.question.startswith("Answer the question")
    assert example.question.endswith("Question: Who? Answer:")


def test_a_folder_of_ruler_tasks(tmp_path):
    for name, ask in (
        ("cwe", CWE_HEAD + "1. a\n" + CWE_ASK),
        ("niah_multikey_2", NIAH_HEAD + NEEDLE + "\n" + NIAH_ASK),
    ):
        write_lines(tmp_path / name / "validation.jsonl", [ruler_row(ask, ["5437923"])])
    assert [task.name for task in load_tasks(tmp_path)] == ["ruler/cwe", "ruler/niah_multikey_2"]
    assert {family.metric for family in RULER.values()} <= set(METRICS)


def test_bad_ruler_lines(tmp_path):
    path = tmp_path / "niah.jsonl"
    good = ruler_row(NIAH_HEAD + NEEDLE + "\n" + NIAH_ASK, ["5437923"])
    for bad, message in (
        ([good | {"input": "Who are you?"}], 'line 1: "input" has no question of a RULER template'),
        ([good, good | {"input": "Who are you?"}], 'line 2: "input" does not end with the question of a niah prompt'),
        ([good | {"outputs": []}], 'line 1: "outputs" must be a list of texts'),
        ([good | {"input": NIAH_HEAD + NIAH_ASK}], "line 1: there is no text to read"),
    ):
        write_lines(path, bad)
        with pytest.raises(ConfigError, match=message):
            load_tasks(path)


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
        load_tasks(path)


def test_what_is_no_task_file(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "folder").mkdir()
    write_lines(tmp_path / "other.jsonl", [{"text": "x"}])
    own = tmp_path / "mine.jsonl"
    write_lines(own, [OWN])
    queries = loft_task(tmp_path / "nq") / "dev_queries.jsonl"
    write_lines(tmp_path / "none" / "corpus.jsonl", [{"pid": "p", "passage_text": "x"}])
    (tmp_path / "none" / "dev_queries.jsonl").write_text("")
    for path, options, message in (
        (tmp_path / "absent.jsonl", {}, "No such file"),
        (tmp_path / "empty.jsonl", {}, "holds no line"),
        (tmp_path / "folder", {}, "holds no task file"),
        (tmp_path / "none", {}, "loft/.*none holds no question"),
        (tmp_path / "other.jsonl", {}, "line 1: this is a line of no known format"),
        (queries, {}, "is a part of a LOFT folder; give the folder, "),
        (own, {"format": "beir"}, "--format must be one of loft, longbench, ruler, ragkv, not 'beir'"),
        (own, {"format": "ruler"}, 'line 1: "input" must be a text'),
        (own, {"metric": "bleu"}, "no metric 'bleu'"),
        (own, {"split": "dev"}, "--split chooses the questions of a LOFT folder"),
        (own, {"limit": 0}, "limit must be at least 1"),
        (own, {"chunk_tokens": 0}, "chunk tokens must be at least 1"),
        (own, {"chunks": -1}, "chunks must be at least 1"),
    ):
        with pytest.raises(RagkvError, match=message):
            load_tasks(path, **options)
    with pytest.raises(UsageError):
        load_tasks(own, format="beir")


def test_a_limit_draws_by_seed_in_the_order_of_the_file(tmp_path):
    write_lines(tmp_path / "mine.jsonl", [OWN] * 40)
    draws = []
    for seed in range(20):
        [task] = load_tasks(tmp_path / "mine.jsonl", limit=10, seed=seed)
        assert task.seed == seed
        draws.append([int(example.example_id) for example in task.examples])
    assert all(len(set(ids)) == 10 and ids == sorted(ids) for ids in draws)
    assert len({tuple(ids) for ids in draws}) == 20
    assert {number for ids in draws for number in ids} == set(range(1, 41))  # every one is drawn sometimes
    [again] = load_tasks(tmp_path / "mine.jsonl", limit=10, seed=7)
    assert [int(example.example_id) for example in again.examples] == draws[7]
    assert len(load_tasks(tmp_path / "mine.jsonl", limit=99)[0].examples) == 40


MARK = re.compile(r"^Passage \d+:", re.MULTILINE)
LINES = st.lists(st.sampled_from(["Passage 1:", "Passage 22: x", "a line", "  indented", "", "see Passage 3: there"]))


@given(lines=LINES, size=st.integers(1, 9))
def test_nothing_but_white_space_is_lost_and_marks_begin_chunks(lines, size):
    text = "\n".join(lines)
    cutter = Cutter(chunk_tokens=size, count_tokens=words)
    for chunks in (cutter.prose(text), cutter.code(text), cutter.passages(text, MARK), cutter.examples(text, MARK)):
        assert "".join("".join(chunks).split()) == "".join(text.split())
        assert all(chunk.strip() for chunk in chunks)
    assert all(words(chunk) <= size for chunk in cutter.prose(text))
    marks = len(MARK.findall(text))
    if marks:
        for chunk in cutter.passages(text, MARK)[-marks:]:
            assert len(MARK.findall(chunk)) == 1
        for chunk in cutter.examples(text, MARK):
            assert words(chunk) <= size or len(MARK.findall(chunk)) <= 1
    else:
        assert cutter.passages(text, MARK) == cutter.examples(text, MARK) == cutter.prose(text)


@pytest.mark.parametrize(("text", "tokens"), [("", 0), ("word", 1), ("words", 2), ("海海海海", 3), ("\ud800", 1)])
def test_tokens_are_estimated_from_bytes(text, tokens):
    assert estimated_tokens(text) == tokens


RELEVANT = {"q1": {"d2": 1}, "q2": {"d3": 2, "d1": 1}, "q3": {"d4": 1}}


@pytest.mark.parametrize("make", [beir_folder, loft_folder])
def test_both_layouts_say_the_same(tmp_path, make):
    task = read_benchmark(make(tmp_path / "tarn"))
    assert {judgement.question_id: judgement.relevant for judgement in task.judgements} == RELEVANT
    assert {judgement.question_id: judgement.question for judgement in task.judgements} == QUESTIONS
    assert [passage.passage_id for passage in task.passages] == ["d1", "d2", "d3", "d4"]
    assert task.passages[0].text == "Halden Works Halden Works makes wall clocks in Tarn."
    assert task.passages[2].text == "Corvo Mills sells flour in Tarn and in Varn."  # no title, and no space before it
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
    loft_folder(folder)  # both are here, and the corpus is LOFT's
    assert len(read_benchmark(folder, layout="loft").judgements) == 3
    with pytest.raises(ConfigError, match='"_id" must be an id'):
        read_benchmark(folder)
    with pytest.raises(UsageError, match="one of beir, loft"):
        read_benchmark(folder, layout="trec")
