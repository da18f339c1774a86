"""Predicted chunks and bytes of an ingest, compared with the ingest; and when there is no verdict."""

import random
from pathlib import Path

import pytest
import words
from indexed import PAIR, write_texts

from ragkv import RagKV, plan
from ragkv.errors import UsageError
from ragkv.plan import busy, disagreement, estimate_corpus, plan_ingest

CORPUS = Path(__file__).parents[1] / "examples" / "corpus"
MINI = {"model": "mini", "dtype": "float32", "embedder": "none", "reranker": "none", "device": "cpu"}
UNHURRIED = 1e6


@pytest.fixture
def documents(tmp_path) -> Path:
    return write_texts(tmp_path / "documents", PAIR | {"halden.md": PAIR["halden.md"] * 4})


@pytest.fixture
def settings(model_folder):
    return {"model": str(model_folder), "device": "cpu", "engines": ("block",), "top_k": 1, "seconds": UNHURRIED}


@pytest.fixture
def many(tmp_path) -> Path:
    """120 files of one line up to some hundred."""
    generator = random.Random(3)
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(120):
        lines = int(generator.paretovariate(0.9)) % 300 + 1
        (folder / f"{number}.txt").write_text("\n".join(f"Halden Works {number} makes pump {n}." for n in range(lines)))
    return folder


def test_chunks_and_bytes_come_true(tmp_path):
    predicted = plan_ingest(CORPUS, codec="int8", engines=("block",), seconds=UNHURRIED, **MINI)
    with RagKV.create(tmp_path / "index", codec="int8", engines=("block",), **MINI) as rag:
        report = rag.ingest(CORPUS)
        stats = rag.store.stats()
    corpus = predicted.corpus
    counts = (corpus.documents, corpus.chunks, corpus.tokens)
    assert counts == (len(report.added), report.chunks, stats.tokens)
    sizes = predicted.kv_bytes
    assert sizes["raw"] == pytest.approx(stats.kv_bytes_raw, rel=0.03)
    assert sizes["int8"] == pytest.approx(stats.kv_bytes, rel=0.03)
    assert predicted.disk_bytes == pytest.approx(stats.used_bytes, rel=0.3)
    assert sizes["raw"] > sizes["zstd"] > sizes["half"] > sizes["q8"] > sizes["int8"] > sizes["int4"]
    assert predicted.to_json()["corpus"]["chunks"] == report.chunks


def test_both_encodings_and_vectors(documents, model_folder, tmp_path, monkeypatch):
    words.install(monkeypatch)
    settings = {"model": str(model_folder), "device": "cpu", "chunk_tokens": 64, "embedder": "words", "codec": "zstd"}
    settings["tuning"] = {"block": {"over": "standalone"}}
    predicted = plan_ingest(documents, top_k=2, seconds=UNHURRIED, **settings)
    with RagKV.create(tmp_path / "index", **settings) as rag:
        rag.ingest(documents)
        stats = rag.store.stats()
    assert predicted.encodings == ["prefixed", "standalone"]
    assert predicted.kv_bytes["zstd"] == pytest.approx(stats.kv_bytes, rel=0.1)


def estimate(folder: Path, seconds: float) -> plan.CorpusEstimate:
    return estimate_corpus([folder], len, max_tokens=200, seconds=seconds)[0]


def test_a_sample_is_near(many, monkeypatch):
    whole = estimate(many, UNHURRIED)
    assert whole.read_files == 120
    clock = iter(range(10**6))
    monkeypatch.setattr(plan, "perf_counter", lambda: next(clock))
    sample = estimate(many, 150)
    assert 40 < sample.read_files < 60
    assert sample.documents == whole.documents
    assert sample.tokens == pytest.approx(whole.tokens, rel=0.1)
    assert sample.chunks == pytest.approx(whole.chunks, rel=0.3)
    assert estimate(many, 0).read_files == 1  # one file is always read


def test_of_a_long_text_a_part_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "WINDOW_CHARACTERS", 4000)
    (tmp_path / "book.md").write_text("\n\n".join(f"# Part {n}\n\nHalden Works makes pumps." for n in range(2000)))
    estimated, texts = estimate_corpus([tmp_path], len, max_tokens=200)
    assert sum(map(len, texts)) <= 4000
    assert estimated.tokens == pytest.approx((tmp_path / "book.md").stat().st_size, rel=0.1)


def test_files_that_cannot_be_read_are_listed(tmp_path):
    with pytest.raises(UsageError, match="Nothing to plan for: no supported files found; name other files"):
        estimate(tmp_path, UNHURRIED)
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(UsageError, match=r"blank\.txt: no text found"):
        estimate(tmp_path, UNHURRIED)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("Bolt Ltd makes valves.")
    estimated = estimate(tmp_path, UNHURRIED)
    assert (estimated.documents, estimated.chunks, estimated.distinct) == (2, 2, 0.5)
    assert [skip.path.name for skip in estimated.skipped] == ["blank.txt"]


def test_the_trial_is_measured_in_order_and_nothing_is_left(documents, tmp_path, settings):
    steps: list[tuple[int, int, str]] = []
    before = sorted(tmp_path.rglob("*"))
    plan_ingest(documents, folder=tmp_path, on_step=lambda *step: steps.append(step), **settings)
    assert sorted(tmp_path.rglob("*")) == before
    assert [what for _, _, what in steps] == ["loading the model", "reading", "encoding", "answering", "done"]


@pytest.mark.parametrize(
    ("repeats", "reason"),
    [
        ((1.0, 1.05, 1.1), ""),
        ((1.0, 2.0, 4.0), "3 repeats of prefill are 150% apart"),
        ((1.0, 1.0), "there was only time to repeat prefill 2 times"),
    ],
)
def test_repeats_that_disagree_prove_nothing(repeats, reason):
    assert disagreement("prefill", repeats) == reason


def test_there_is_no_verdict_on_a_busy_machine(documents, settings, monkeypatch):
    assert busy(0.0) == []
    assert "the machine is busy: its load is 5000.0 on" in busy(5000.0)[0]
    monkeypatch.setattr(plan, "disagreement", lambda what, repeats: "")
    monkeypatch.setattr(plan, "busy", lambda: ["the machine is busy"])
    result = plan_ingest(documents, **settings)
    assert (result.pays, result.repaid_after, result.to_json()["no_verdict"]) == (None, None, ["the machine is busy"])
    monkeypatch.setattr(plan, "busy", list)
    quiet = plan_ingest(documents, **settings)
    assert quiet.pays is (quiet.first_token_seconds < quiet.prefill_seconds)
    assert (quiet.repaid_after is not None) is quiet.pays
