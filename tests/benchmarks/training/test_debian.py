"""`benchmarks/training/debian`: gold answers are in gold passages, passages in documents, and works have terms."""

import json
from pathlib import Path

from ragkv.benchmarks.evaluation.files import load_task
from ragkv.benchmarks.training.debian.make import passages
from ragkv.doctor.questions import normal

HERE = Path(__file__).parents[3] / "benchmarks" / "training" / "debian"
DOCUMENTS = {
    path.relative_to(HERE / "documents").as_posix(): path.read_text(encoding="utf-8")
    for path in sorted((HERE / "documents").glob("*/*.md"))
}
ROWS = [json.loads(line) for line in (HERE / "questions.jsonl").read_text(encoding="utf-8").splitlines()]
GOLD = [row for row in ROWS if row["evidence"]]


def test_a_gold_answer_stands_in_a_gold_passage_and_in_no_other():
    for row in GOLD:
        needed = [row["chunks"][place] for place in row["needed"]]
        others = [chunk for place, chunk in enumerate(row["chunks"]) if place not in row["needed"]]
        for answer in map(normal, row["answers"]):
            assert not any(answer in normal(chunk) for chunk in others), row["id"]
        assert any(normal(answer) in normal(chunk) for answer in row["answers"] for chunk in needed), row["id"]


def test_evidence_stands_in_the_source_and_in_one_gold_passage():
    for row in GOLD:
        needed = [row["chunks"][place] for place in row["needed"]]
        assert 1 <= len(needed) <= len(row["evidence"])
        for evidence in row["evidence"]:
            assert any(evidence in DOCUMENTS[source] for source in row["sources"]), row["id"]
            assert sum(evidence in chunk for chunk in needed) == 1, row["id"]
        assert (row["kind"] == "two passages") == (len(row["evidence"]) == 2)


def test_every_chunk_is_a_passage_below_its_heading():
    texts = list(DOCUMENTS.values())
    found = {chunk for row in ROWS for chunk in row["chunks"]}
    for chunk in found:
        heading, _, passage = chunk.partition("\n\n")
        assert any(passage in text and heading.rpartition(": ")[2] in text for text in texts), chunk
    for row in ROWS:
        assert len(set(row["chunks"])) == 4


def test_every_work_has_its_terms():
    table = (HERE / "README.md").read_text(encoding="utf-8")
    for work, words in {
        "debian-handbook": "Creative Commons Attribution-ShareAlike 3.0 Unported",
        "debian-faq": "Permission is granted to make and distribute verbatim copies",
        "python": "PSF LICENSE AGREEMENT FOR PYTHON",
    }.items():
        assert words in (HERE / "licences" / f"{work}.txt").read_text(encoding="utf-8")
        assert f"(licences/{work}.txt)" in table
    assert {Path(name).parts[0] for name in DOCUMENTS} == {"debian-handbook", "debian-faq", "python"}
    assert sum(path.stat().st_size for path in HERE.rglob("*") if path.is_file()) < 3_000_000


def test_it_is_read_as_a_task():
    task = load_task(HERE / "questions.jsonl")
    examples = list(task.examples)
    assert len(examples) == len(ROWS)
    assert {example.kind for example in examples} == {row["kind"] for row in ROWS}
    assert all(len(example.chunks) == 4 for example in examples)


def test_passages_are_the_document_in_order():
    for name, text in DOCUMENTS.items():
        end = 0
        for passage in passages(name, text):
            end = text.index(passage.text, end) + len(passage.text)
