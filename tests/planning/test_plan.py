"""Predicted chunks and bytes of an ingest with mini, compared with the ingest; and the use of measured times."""

from pathlib import Path

import pytest
import words
from indexed import PAIR, write_texts
from steady import steady

from ragkv import RagKV
from ragkv.errors import ConfigError, UsageError
from ragkv.planning.calibration import EngineCalibration, Repeats, TimingQuality
from ragkv.planning.plan import plan_ingest

CORPUS = Path(__file__).parents[2] / "examples" / "corpus"
SETTINGS = {"model": "mini", "dtype": "float32", "embedder": "none", "reranker": "none", "device": "cpu"}


@pytest.fixture
def documents(tmp_path) -> Path:
    return write_texts(tmp_path / "documents", PAIR | {"halden.md": PAIR["halden.md"] * 4})


@pytest.fixture
def settings(model_folder):
    return {"model": str(model_folder), "device": "cpu", "engines": ("block",), "top_k": 1}


@pytest.fixture
def quick(monkeypatch):
    """One trial of a fixed size with a fake clock, because only counts are tested."""
    for name, value in {"BATCH_TOKENS": 700, "ROUNDS": 1}.items():
        monkeypatch.setattr(f"ragkv.planning.calibration.{name}", value)
    monkeypatch.setattr("ragkv.planning.plan.perf_counter", steady())


def test_chunks_and_bytes_come_true(quick, tmp_path):
    plan = plan_ingest(CORPUS, codec="int8", engines=("block",), **SETTINGS)
    with RagKV.create(tmp_path / "index", codec="int8", engines=("block",), **SETTINGS) as rag:
        report = rag.ingest(CORPUS)
        stats = rag.stats()
    assert plan.trial_tokens < stats.tokens / 2  # the trial is only a part
    corpus = plan.corpus
    assert (corpus.documents.value, corpus.chunks.value, corpus.tokens.value) == (
        len(report.added),
        report.chunks,
        stats.tokens,
    )
    bytes_of = {found.codec: found.kv_bytes.value for found in plan.codecs}
    assert bytes_of["raw"] == pytest.approx(stats.kv_bytes_raw, abs=1)
    assert bytes_of["int8"] == pytest.approx(stats.kv_bytes, rel=0.03)
    assert plan.disk_bytes.value == pytest.approx(stats.used_bytes, rel=0.2)
    assert bytes_of["raw"] > bytes_of["zstd"] > bytes_of["half"] > bytes_of["q8"] > bytes_of["int8"] > bytes_of["int4"]


def test_both_encodings_and_vectors(quick, documents, model_folder, tmp_path, monkeypatch):
    words.install(monkeypatch)
    settings = {"model": str(model_folder), "device": "cpu", "chunk_tokens": 64, "embedder": "words", "codec": "zstd"}
    settings["tuning"] = {"block": {"over": "standalone"}}
    plan = plan_ingest(documents, top_k=2, **settings)
    with RagKV.create(tmp_path / "index", **settings) as rag:
        rag.ingest(documents)
        stats, vectors = rag.stats(), sum(found.vector_bytes for found in rag.document_stats())
    assert plan.encodings == ("prefixed", "standalone")
    assert plan.codecs[0].kv_bytes.value == pytest.approx(stats.kv_bytes_raw, abs=1)
    assert next(c for c in plan.codecs if c.codec == "zstd").kv_bytes.value == pytest.approx(stats.kv_bytes, rel=0.05)
    assert plan.vector_bytes == pytest.approx(vectors, rel=0.05)
    assert [found.engine for found in plan.engines] == ["ape", "block", "pced"]
    assert {found.chunks for found in plan.engines} == {2}


def test_time_is_repeated_and_its_spread_is_told(documents, settings):
    plan = plan_ingest(documents, now=steady(), seconds=1e6, **settings)
    assert len(plan.encode.seconds) == 5
    assert {len(found.first_token.seconds) for found in plan.engines} == {5}
    assert plan.fastest.total <= plan.seconds.total <= plan.slowest.total
    assert (plan.trust.trusted, plan.left_out) == (True, ())
    result = plan.to_json()
    assert result["encode_us_per_token"]["repeats"] == result["first_token"][0]["repeats"] == 5
    assert result["encode_us_per_token"]["low"] <= result["encode_us_per_token"]["value"]
    assert result["trust"] == {"trusted": True, "reasons": [], "waited": None}
    assert result["seconds_fastest"].keys() == result["seconds"].keys()


def test_a_machine_that_is_not_steady_is_said(documents, settings):
    uneven = steady(0.01, 0.02, 0.05, 0.07, 0.11, 0.13, 0.17)
    plan = plan_ingest(documents, now=uneven, seconds=1e6, **settings)
    assert not plan.trust.trusted
    assert all("of their median apart: the machine was not steady" in reason for reason in plan.trust.reasons)


def test_when_time_is_over_all_is_measured_once_and_the_rest_is_said(tmp_path, model_folder):
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text(f"Bolt Ltd makes valves, number {number}.\n" * 20)
    settings = {"model": str(model_folder), "device": "cpu", "engines": ("block",), "chunk_tokens": 64}
    plan = plan_ingest(tmp_path, now=steady(100.0), seconds=30, **settings)
    assert (plan.corpus.whole, plan.corpus.cut_short, plan.corpus.read_sources) == (False, True, 1)
    assert plan.corpus.chunks.spread > 0
    assert [codec.codec for codec in plan.codecs] == ["half"]
    assert (len(plan.encode.seconds), plan.trial_chunks) == (1, 1)
    assert len(plan.engines[0].prefill.seconds) == 1
    message = " ".join(plan.left_out)
    for what in ("Parts of 1 of 9 files were read", "Codec raw and zstd and q8 and int8 and int4 were not tried"):
        assert what in message
    assert "encoding was timed only once" in plan.trust.reasons[0]
    assert plan.to_json()["left_out"] == list(plan.left_out)


def test_the_first_steps_have_no_total_and_nothing_is_written(quick, documents, tmp_path, settings):
    steps: list[tuple[int, int, str]] = []
    before = sorted(tmp_path.rglob("*"))
    plan_ingest(documents, folder=tmp_path, on_step=lambda *step: steps.append(step), **settings)
    assert sorted(tmp_path.rglob("*")) == before
    assert steps[:4] == [
        (0, 0, "loading the model"),
        (0, 0, "reading"),
        (0, 2, "reading"),
        (1, 2, "reading"),
    ]
    assert steps[-1] == (9, 9, "done")


@pytest.mark.parametrize(
    ("rates", "token"),
    [
        ((1000, 40), 58),  # 1.105 s behind after two tokens; each further token makes up 20 ms
        ((1000, 20), None),  # no faster per token: it never catches up
        ((4000, 40), 2),  # the chunks are laid out before the second token
        ((4001, 20), 1),  # its prefill alone is faster
    ],
)
def test_another_runtime_overtakes_with_the_right_token(rates, token):
    seconds = {"first_token": 0.5, "second_token": 0.42, "token": 0.045, "prefill": 1.0}
    repeats = {name: Repeats(seconds=(value,)) for name, value in seconds.items()}
    found = EngineCalibration(engine="block", chunks=8, context_tokens=1900, prompt_tokens=2000, **repeats)
    assert found.overtaken_after(*rates) == token


NONE, ENDLESS = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("changes", "error", "what"),
    [
        *(({"beside": each}, UsageError, "--beside takes two rates above 0") for each in ((0.0, 1.0), (1.0, -1.0))),
        *(({"beside": each}, UsageError, "--beside takes two rates above 0") for each in ((NONE, 1.0), (1.0, ENDLESS))),
        *(({"seconds": each}, UsageError, "--seconds must be more than 0") for each in (0, -1, NONE, ENDLESS)),
        ({"engines": ("full",)}, UsageError, "full stores no KV, so there is nothing to plan; add one of ape"),
        ({"codec": "zip"}, ConfigError, "unknown codec 'zip'"),
        ({"chunk_tokens": 1}, ConfigError, "chunk_tokens must be between"),
        ({"folder": Path("/nowhere")}, UsageError, "A temporary folder cannot be made in /nowhere"),
    ],
)
def test_bad_input_says_what_to_do(documents, settings, changes, error, what):
    with pytest.raises(error, match=what):
        plan_ingest(documents, **settings | changes)


def repeats(*seconds: float) -> Repeats:
    return Repeats(seconds=seconds)


def test_repeats_have_a_median_and_both_ends():
    found = repeats(1.0, 1.1, 9.0)
    assert (found.value, found.low, found.high) == (1.1, 1.0, 9.0)
    assert found.to_json(1e-3) == {"value": 1100, "low": 1000, "high": 9000, "repeats": 3}


@pytest.mark.parametrize(
    ("seconds", "spread"),
    [
        ((2.0,), 0),
        ((1.0, 2.0, 1.5), 1 / 1.5),
        ((1.0, 1.0, 1.0, 1.1, 7.0), 0.1),  # one outlier of five is allowed
        ((1.0, 1.0, 1.0, 2.0, 2.0), 1.0),
        ((0.0, 0.0, 0.0), 0),
    ],
)
def test_how_far_they_lie_apart(seconds, spread):
    assert repeats(*seconds).spread == pytest.approx(spread)


def test_a_quiet_machine_is_trusted_and_others_are_not():
    quiet = {"encoding": repeats(1.0, 1.05, 1.1), "prefill": repeats(2.0, 2.0, 2.1)}
    assert TimingQuality.of(quiet).trusted
    assert TimingQuality.of(quiet).to_json() == {"trusted": True, "reasons": [], "waited": None}
    [wide] = TimingQuality.of(quiet | {"prefill": repeats(1.0, 2.0, 4.0)}).reasons
    assert wide.startswith("3 repeats of prefill are 150% of their median apart")
    once, twice = TimingQuality.of({"encoding": repeats(1.0), "prefill": repeats(1.0, 1.0)}).reasons
    assert "encoding was timed only once" in once
    assert "prefill was timed only 2 times" in twice
