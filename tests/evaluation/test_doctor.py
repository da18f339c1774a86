"""`ragkv doctor`: its figures follow from the streams, and it leaves the index unchanged."""

import json
import random
from dataclasses import replace
from statistics import fmean

import pytest

from ragkv.doctor.compare import ChunkReader
from ragkv.doctor.health import remedies
from ragkv.doctor.questions import GoldenQuestion
from ragkv.doctor.report import Doctor
from ragkv.doctor.specs import Spec
from ragkv.doctor.verdicts import (
    CODEC_LIMITS,
    ENGINE_LIMITS,
    Agreement,
    EngineRow,
    agreement_verdict,
    difference_interval,
    engine_advice,
    loss_verdict,
    mean_interval,
    proposed,
    share_interval,
)
from ragkv.engines import make_engine
from ragkv.errors import ConfigError, RetrievalError, UsageError
from ragkv.index.conversation import proved_history
from ragkv.index.quality import UNKNOWN, keep_quality, kept_quality, outdated, unread_quality
from ragkv.ingest import from_bytes
from ragkv.model.self_check import load_model
from ragkv.pipeline import RagKV
from ragkv.runtime import Stream, runtime_of

ASKED = [GoldenQuestion(text="Who founded Halden Works?"), GoldenQuestion(text="What does Bolt Ltd make for ships?")]
STEPS = 4


def examine(rag, questions=ASKED, *, engines=None, **options):
    options["engines"] = None if engines is None else list(map(Spec, engines))
    return Doctor(rag, **({"max_new_tokens": STEPS} | options)).examine(questions, source="here", seed=0)


def along(first, second, ends):
    """For each token of the first stream's answer, the KL to the second's scores, and whether that chose it too."""
    for _ in range(STEPS):
        token = first.best()
        p, q = (stream.scores.log_softmax(-1) for stream in (first, second))
        yield float((p.exp() * (p - q)).sum()), second.best() == token
        if token in ends:
            break
        for stream in (first, second):
            stream.advance(token)


def test_figures_are_those_of_the_streams(rag):
    quality = examine(rag, engines=["ape", "pced"], codecs=["raw"])
    for row in quality.engines:
        steps, same = [], 0
        for question in ASKED:
            scored = rag.retrieve(question.text)[::-1]
            streams = (
                Stream(rag.index.runtime, made, rag.request(made, question.text, scored)[0])
                for made in (make_engine(name, {}) for name in ("full", row.engine))
            )
            steps += along(*streams, rag.model.eos_ids)
            texts = [rag.query(question.text, engine=name, max_new_tokens=STEPS).text for name in ("full", row.engine)]
            same += texts[0] == texts[1]
        assert row.kl == pytest.approx(fmean(kl for kl, _ in steps), rel=1e-3, abs=1e-4)
        assert row.top1 == pytest.approx(fmean(agreed for _, agreed in steps))
        assert row.answers == same / len(ASKED)
        assert quality.tokens == len(steps)


def row_of(label, verdict, first_token, kv_bytes=1, **options):
    figures = {"kl": 0.0, "top1": 0.9, "answers": 1.0, "accuracy": 0.5}
    ci95 = {"kl": (0.0, 0.1), "top1": (0.8, 0.95), "answers": (0.9, 1.0), "loss": (-0.1, 0.2)}
    return EngineRow(
        engine=label.partition("(")[0], label=label, options=options, verdict=verdict, by="agreement", advice="",
        ci95=ci95, first_token=first_token, kv_bytes=kv_bytes, settings={}, **figures,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([("ape", "good", 0.3), ("pced", "good", 0.2), ("single", "fair", 0.1)], 'default_engine = "pced" in'),
        ([("ape", "good", 0.105, 1), ("pced", "good", 0.1, 9)], 'default_engine = "ape" in'),  # fewer bytes
        (
            [("ape", "poor", 0.1), ("single", "fair", 0.25)],
            "answers are fair beside full attention, and its first token",
        ),
        ([("ape", "good", 1.5), ("pced", "not enough to tell", 0.1)], "--engine full"),  # slower; unknown
        ([("ape", "poor", 0.1)], "--engine full"),
    ],
)
def test_one_setting_is_proposed(rows, says):
    assert says in proposed([row_of(*row) for row in rows], 1.0)


def test_a_proposal_names_the_options_and_how_much_sooner():
    sentence = proposed([row_of("block(context=256)", "fair", 0.25, context=256)], 1.0)
    assert 'default_engine = "block" and context = 256 under [encoding] (then ingest again) in ragkv.toml' in sentence
    sentence = proposed([row_of("block(over=prefixed)", "good", 0.25, over="prefixed")], 1.0)
    assert 'default_engine = "block" and over = "prefixed" under [tuning.block] in ragkv.toml' in sentence
    assert "4.0 times faster" in sentence


def test_the_engines_of_the_index_and_those_that_could_replace_them(rag):
    rag.ingest(from_bytes(b"# Halden Works\n\n" + b"Halden Works makes valves for ships. " * 20, name="long.md"))
    quality = examine(rag, codecs=["raw"])
    labels = ["ape", "block", "pced", "blend", "block(over=standalone)", "block(context=256)"]
    assert [row.label for row in quality.engines] == labels
    ape, block, _, _, alone, seeing = quality.engines
    assert (seeing.options, seeing.settings) == ({"context": 256}, block.settings)
    assert seeing.kl != block.kl  # its chunks saw the text before them
    assert (alone.engine, alone.options, alone.settings["over"]) == ("block", {"over": "standalone"}, "standalone")
    assert (block.options, block.settings["over"]) == ({}, "prefixed")
    assert block.kl != alone.kl
    assert 0 < ape.kv_bytes == block.kv_bytes == alone.kv_bytes
    assert min(row.first_token for row in quality.engines) > 0
    assert quality.full_first_token > 0
    assert [row.engine for row in quality.codecs] == ["ape", "block", "pced"]
    assert quality.proposal.startswith("Proposed: ")


def test_ape_with_one_chunk_and_nothing_tuned_is_full_attention(rag):
    rag.index.config = replace(rag.config, tuning={"ape": {"temperature": 1.0, "scale": 1.0}})
    [row] = examine(rag, engines=["ape", "full"], top_k=1).engines
    assert row.kl < 1e-6
    assert (row.top1, row.answers, row.verdict) == (1.0, 1.0, "not enough to tell")
    assert row.ci95["top1"][0] < 0.5  # from two questions
    assert row.settings["temperature"] == 1.0


def test_int8_weights_are_judged_against_those_of_the_checkpoint(tmp_path, documents, model_folder):
    settings = {"device": "cpu", "chunk_tokens": 128, "top_k": 2, "dtype": "int8"}
    with RagKV.create(tmp_path / "index", model=str(model_folder), engines=["block"], **settings) as rag:
        rag.ingest(documents)
        assert rag.query(ASKED[0].text, max_new_tokens=1).dtype == "int8"
        quality = examine(rag, engines=["block"])
        [row] = quality.codecs
        exact = load_model(str(model_folder), dtype="float32")
        steps = []
        for question in ASKED:
            request = rag.request(make_engine("full", {}), question.text, rag.retrieve(question.text)[::-1])[0]
            streams = (Stream(runtime_of(model), make_engine("full", {}), request) for model in (rag.model, exact))
            steps += along(*streams, rag.model.eos_ids)
    assert (row.engine, row.codec, row.exact) == ("full", "int8 weights", False)
    assert 0 < row.kl == pytest.approx(fmean(kl for kl, _ in steps), rel=1e-3)


def test_codecs_are_compared_with_the_same_engine(rag, coarse):
    quality = examine(rag, engines=["block", "ape"], codecs=["raw", "zstd", coarse])
    rows = {(row.engine, row.codec): row for row in quality.codecs}
    assert len(rows) == 6
    for engine in quality.engines:
        raw = rows[engine.engine, "raw"]
        assert (raw.exact, raw.kl, raw.size, raw.verdict) == (True, 0.0, 1.0, "good")
        assert rows[engine.engine, "zstd"].size < 1
        lossy = rows[engine.engine, coarse]
        assert not lossy.exact
        assert 0 < lossy.kl < 0.01
        assert json.loads(json.dumps(quality.to_json()))["codecs"][0]["engine"] == "block"


def test_gold_answers_are_counted_for_full_and_every_engine(rag):
    text = rag.query(ASKED[0].text, engine="full", max_new_tokens=STEPS).text
    asked = [
        GoldenQuestion(text=ASKED[0].text, answers=(text,)),
        GoldenQuestion(text=ASKED[1].text, answers=("never",)),
        ASKED[1],
    ]
    quality = examine(rag, asked, engines=["block"])
    assert (quality.gold, quality.full_accuracy) == (2, 0.5)
    own = rag.query(ASKED[0].text, engine="block", max_new_tokens=STEPS).text
    assert quality.engines[0].accuracy == (0.5 if text.casefold() in own.casefold() else 0.0)


def test_the_index_is_left_alone_whatever_model_is_tried(rag, other_model):
    before = rag.store.stats()
    quality = examine(rag, model=str(other_model), engines=["block"])
    assert rag.store.stats() == before
    assert quality.fingerprint != rag.index.fingerprint
    assert quality.engines[0].kl > 0
    own = examine(rag, engines=["block"])
    for report in (own, quality, own):
        keep_quality(rag.store, report.to_json())
    kept = kept_quality(rag.store)
    assert [report["model"] for report in kept] == [rag.config.model, str(other_model)]
    assert [outdated(rag.store, report) for report in kept] == [None, "another model than the index's"]
    reader = ChunkReader(rag, str(other_model))
    assert not reader.own
    assert "index of its own" in remedies(rag.store.stats(), reader)[0]


def test_a_report_is_outdated_when_the_documents_changed(rag, documents):
    keep_quality(rag.store, examine(rag, ASKED[:1], engines=["block"]).to_json())
    (documents / "new.txt").write_text("Dorn Mill was founded by Karl Dorn.")
    rag.ingest(documents)
    assert outdated(rag.store, kept_quality(rag.store)[0]) == "the documents changed since"


def test_an_odd_value_in_the_index_is_no_report_and_is_replaced(rag):
    report = json.loads(json.dumps(examine(rag, ASKED[:1], engines=["block"]).to_json()))
    [row] = report["engines"]
    for odd in (
        3,
        {"a": 1},
        [None],
        [{}],
        [{"engines": 3}],
        [{**report, "engines": [{}]}],
        [{**report, "date": 3}],
        [{**report, "questions": "many"}],
        [{**report, "engines": [{**row, "top1": 10**400}]}],
        [{**report, "engines": [{**row, "verdict": ["good"]}]}],
        [{**report, "engines": [{**row, "ci95": None}]}],
        [{**report, "engines": [{**row, "ci95": {**row["ci95"], "top1": [0.5]}}]}],
    ):
        rag.store.put_meta("quality", odd)
        assert kept_quality(rag.store) == []
        assert unread_quality(rag.store)
        keep_quality(rag.store, report)
        assert kept_quality(rag.store) == [report]
        assert not unread_quality(rag.store)


def test_chunks_of_another_version_of_the_model_are_read_from_their_text(rag):
    rag.store.put_meta("model", {"name": rag.config.model, "fingerprint": "0" * 64})
    reader = ChunkReader(rag)
    assert (reader.own, reader.current) == (True, False)
    assert "run ragkv ingest on all of its documents again" in remedies(rag.store.stats(), reader)[0]
    scored = rag.retrieve(ASKED[0].text)
    best = reader.request(make_engine("full", {}), ASKED[0].text, scored).chunks[-1]
    assert best.token_ids == scored[0].chunk.token_ids


def test_questions_that_find_nothing_are_counted_and_all_of_them_are_an_error(rag):
    lost = GoldenQuestion(text="zyzzyva")
    assert examine(rag, [lost, ASKED[0]], engines=["block"]).skipped == 1
    with pytest.raises(RetrievalError, match="No question finds a chunk"):
        examine(rag, [lost], engines=["block"])


def test_what_there_is_not_is_refused(rag):
    with pytest.raises(UsageError, match="Unknown engine 'warp'"):
        examine(rag, engines=["warp"])
    with pytest.raises(UsageError, match="no engine to compare"):
        examine(rag, engines=["full"])
    with pytest.raises(ConfigError, match="brotli"):
        examine(rag, codecs=["brotli"])


def test_progress_ends_where_it_said(rag):
    result = []
    Doctor(rag, engines=[Spec("block")], codecs=["raw"], max_new_tokens=1).examine(
        ASKED, source="", seed=0, on_progress=lambda *step: result.append(step)
    )
    assert result[0] == (0, 8, "full")
    # no question has enough previous turns, so the conversation step is skipped
    assert [done for done, _, _ in result] == [0, 1, 2, 4, 5, 6, 8]
    assert {what for _, _, what in result} == {"full", "block", "block, raw", ""}


@pytest.mark.parametrize(
    ("loss", "verdict"),
    [
        ((-0.02, 0.05), "good"),
        ((0.01, 0.051), "fair"),
        ((-0.05, 0.10), "fair"),
        ((0.06, 0.2), "not enough to tell"),
        ((-0.6, 0.6), "not enough to tell"),
        ((0.11, 0.3), "poor"),
    ],
)
def test_verdicts_by_accuracy(loss, verdict):
    assert loss_verdict(loss) == verdict


def agreement(kl=(0.0, 0.01), top1=(0.97, 1.0), answers=(0.9, 1.0)):
    return Agreement(kl=kl, top1=top1, answers=answers)


@pytest.mark.parametrize(
    ("figures", "verdict", "of_codec"),
    [
        ({}, "good", "good"),
        ({"kl": (0.01, 0.05)}, "good", "fair"),
        ({"top1": (0.94, 1.0)}, "fair", "fair"),
        ({"answers": (0.66, 0.9)}, "fair", "fair"),  # a third of the answers may differ: not as good as full
        ({"top1": (0.41, 1.0), "answers": (0.12, 1.0)}, "not enough to tell", "not enough to tell"),
        ({"top1": (0.3, 0.8), "answers": (0.1, 0.5)}, "poor", "poor"),
        ({"kl": (0.6, 0.9)}, "poor", "poor"),
        ({"kl": (0.2, 0.9)}, "not enough to tell", "poor"),
    ],
)
def test_verdicts_by_agreement(figures, verdict, of_codec):
    found = agreement(**figures)
    assert agreement_verdict(ENGINE_LIMITS, found) == verdict
    assert agreement_verdict(CODEC_LIMITS, found) == of_codec


def test_joined_scores_are_not_judged_by_their_kl():
    assert agreement_verdict(ENGINE_LIMITS, agreement(kl=(3, 4)), joined=True) == "good"
    assert agreement_verdict(ENGINE_LIMITS, agreement(kl=(3, 4), top1=(0.1, 0.3)), joined=True) == "poor"


def test_advice_names_the_remedy_and_the_way_out():
    poor = {"verdict": "poor", "tuned_for_blocks": False, "other": None}
    assert engine_advice("block", **poor).startswith("Use a model that was trained to read blocks, or answer with")
    assert "--engine full" in engine_advice("block", **poor | {"tuned_for_blocks": True})
    assert "`ragkv tune FILE.jsonl`, or answer with --engine pced" in engine_advice("ape", **poor | {"other": "pced"})
    assert "departs from full" in engine_advice("mine", **poor)
    assert "ask more (--limit N" in engine_advice("ape", **poor | {"verdict": "not enough to tell"})


def test_accuracy_decides_once_enough_questions_are_answered_right(rag, monkeypatch):
    question = ASKED[0].text
    texts = [rag.query(question, engine=name, max_new_tokens=9).text for name in ("full", "block")]
    assert all(texts)
    assert texts[0] != texts[1]
    gold = [GoldenQuestion(text=question, answers=tuple(texts))]
    monkeypatch.setattr("ragkv.doctor.report.ENOUGH", 2)
    [few] = examine(rag, gold, engines=["block"], max_new_tokens=9).engines
    monkeypatch.setattr("ragkv.doctor.report.ENOUGH", 1)
    [enough] = examine(rag, gold, engines=["block"], max_new_tokens=9).engines
    assert few.accuracy == enough.accuracy == 1.0
    assert (few.by, enough.by) == ("agreement", "accuracy")
    assert enough.ci95["loss"] == (-1.0, 1.0)
    assert (few.verdict, enough.verdict) == ("not enough to tell", "not enough to tell")  # from one question


@pytest.mark.parametrize(
    ("verdict", "by", "expected"),
    [
        ("good", "accuracy", "prompt"),
        ("fair", "accuracy", "prompt"),
        ("poor", "accuracy", "search"),
        ("poor", "agreement", "search"),
        ("good", "agreement", None),  # mini agrees with itself, but half of its answers in conversations are wrong
        ("fair", "agreement", None),
        (UNKNOWN, "accuracy", None),
    ],
)
def test_only_right_answers_put_earlier_turns_into_the_prompt(verdict, by, expected):
    assert proved_history(verdict, by) == expected


@pytest.mark.parametrize(("n", "least"), [(3, 0.408), (8, 0.704), (60, 0.952), (100, 0.971)])
def test_without_a_fault_the_number_of_questions_decides(n, least):
    assert share_interval([1] * n) == (pytest.approx(least, abs=1e-3), 1.0)
    assert share_interval([64] * n, [64] * n) == share_interval([1] * n)  # the tokens of an answer are one cluster
    assert share_interval([0] * n) == (0.0, pytest.approx(1 - least, abs=1e-3))


def test_paired_differences_are_those_of_bonett_and_price():
    """(b + 1 - c - 1) / (n + 2), and its standard error except for n / (n - 1)."""
    n, b, c = 60, 7, 2
    p, q = (b + 1) / (n + 2), (c + 1) / (n + 2)
    value, error = p - q, 1.96 * ((p + q - (p - q) ** 2) / (n + 1)) ** 0.5
    found = difference_interval([1] * b + [-1] * c + [0] * (n - b - c))
    assert found == pytest.approx((value - error, value + error), abs=1e-5)


def test_long_answers_weigh_more():
    low, high = share_interval([100, 0], [100, 1])
    assert 0 < low < 100 / 101 < high
    assert low > share_interval([1, 0], [1, 1])[0]


def test_a_mean_without_a_bound_leaves_room_for_the_worst():
    assert mean_interval([0.0, 0.0], [3, 5]) == (0.0, 0.0)
    low, high = mean_interval([0.1, 0.1, 4.0], [10, 10, 10])
    assert low < 4.2 / 30 < high
    assert high > 0.2


@pytest.mark.parametrize(("share", "n"), [(0.95, 100), (0.85, 60), (0.8, 100)])
def test_a_share_below_the_limit_is_seldom_called_sure(share, n):
    """The rate of wrong verdicts: the lower end is above the true share."""
    draw = random.Random(5)
    wrong = sum(share_interval([draw.random() < share for _ in range(n)])[0] > share for _ in range(2000))
    assert wrong / 2000 < 0.05
