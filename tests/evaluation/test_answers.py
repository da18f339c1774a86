"""Candidates on tasks: answers equal the pipeline's, nothing is computed twice, figures follow from the answers.

Given chunks are scored as an index would score them.
"""

import itertools
import shutil
from collections import Counter
from dataclasses import fields, replace

import pytest
import torch
import words
from benchmarkfolder import CountingEmbedder
from indexed import indexed

from ragkv import RagKV
from ragkv.benchmarks.evaluation import answers
from ragkv.benchmarks.evaluation.answers import (
    Candidate,
    ExampleResult,
    IndexSource,
    TaskSource,
    all_candidates,
    baseline_of,
    rows_of,
    run,
    run_candidates,
)
from ragkv.benchmarks.evaluation.metrics import Example, Task, bootstrap_mean
from ragkv.config import MODES
from ragkv.doctor.specs import parse_specs
from ragkv.errors import ConfigError, UsageError
from ragkv.model.apb.compressors import RetainingHeads, widths_of
from ragkv.model.checkpoint import HEADS
from ragkv.model.language_model import LanguageModel
from ragkv.model.self_check import load_model
from ragkv.runtime import Runtime
from ragkv.types import ScoredChunk

CHUNKS = ("Halden Works was founded by Mira Oskel.", "Bolt Ltd makes valves.", "Corvo Mills sells flour in Varn.")
QUESTIONS = ("Who founded Halden Works?", "What does Bolt Ltd make?", "Who sells flour in Varn?")
TASK = Task(
    name="small",
    metric="subspan_em",
    examples=[
        Example(example_id=str(at), question=text, chunks=CHUNKS, answers=("e",), kind="odd" if at % 2 else "even")
        for at, text in enumerate(QUESTIONS)
    ],
    max_new_tokens=6,
)
ENGINES = "full,single,ape,ape(temperature=0.4, scale=0.7),block,pced(gamma=0.5)"


@pytest.fixture
def asked(model_folder):
    def make(engines: str = ENGINES, **settings):
        return all_candidates(parse_specs(engines), models=[str(model_folder)], **settings)

    return make


def test_answers_are_those_of_the_pipeline(tmp_path, model_folder, asked):
    settings = {"model": str(model_folder), "device": "cpu", "chunk_tokens": 128}
    tuning = {
        "block": {"over": "standalone"},
        "ape": {"temperature": 0.4, "scale": 0.7},
        "pced": {"gamma": 0.5},
    }
    everyone = asked(ENGINES, retrievals=["bm25"], codecs=["raw", "int8"])
    assert len(everyone) == 10  # full and single read no KV, so codecs do not apply
    found = {
        (result.candidate.label, result.candidate.codec, result.example.question): result
        for result in run_candidates([TASK], everyone, source=TaskSource())
    }
    for codec in ("raw", "int8"):
        with RagKV.create(tmp_path / codec, codec=codec, tuning=tuning, **settings) as rag:
            chunks = [rag.chunk(text, chunk_id=str(at)) for at, text in enumerate(CHUNKS)]
            for candidate in everyone:
                if candidate.codec != codec or candidate.label == "ape":
                    continue
                for question in QUESTIONS:
                    result = found[candidate.label, codec, question]
                    scored = [
                        ScoredChunk(chunk=chunks[at], source="", retrieval_score=0.0, rerank_score=None, score=score)
                        for at, score in reversed(_bm25(question))
                    ]
                    for tokens in (1, 6):  # KV that the first call encodes passes the codec before the second
                        answer = rag.query(
                            question, engine=candidate.engine, chunks=scored, max_new_tokens=tokens, keep=True
                        )
                        rag.maintenance.settle()
                    assert result.text == answer.text
                    if candidate.engine == "pced":
                        won = [winner for _, winner in result.trace]
                        assert len(won) >= 1
                        assert set(won) <= {0, 1, 2}
                        counts = {source.chunk_id: source.tokens_won for source in answer.sources}
                        assert {str(at): won.count(at) for at in range(3)} == counts


def _bm25(question):
    return TaskSource().rank(question, CHUNKS, "bm25", rerank=False)


def test_a_stopped_run_goes_on_and_a_whole_one_needs_no_model(tmp_path, asked, monkeypatch):
    everyone = asked("full,pced")
    whole = run([TASK], everyone)
    seen = []

    def stop(done, total, what):
        seen.append((done, total, what))
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_candidates([TASK], everyone, source=TaskSource(), work=tmp_path, on_progress=stop)
    assert seen == [(0, 6, "small, full"), (1, 6, "small, pced"), (2, 6, "small, full"), (3, 6, "small, pced")]
    counted = []
    submit = Runtime.submit
    monkeypatch.setattr(Runtime, "submit", lambda *args, **more: counted.append(1) or submit(*args, **more))
    assert run([TASK], everyone, work=tmp_path) == whole
    assert len(counted) == 3

    def load(*_args, **_more):
        raise AssertionError("loaded")

    monkeypatch.setattr(answers.LoadedModel, "model", property(load))
    again = run_candidates([TASK], everyone, source=TaskSource(), work=tmp_path)
    assert rows_of([TASK], everyone, again, baseline="full") == whole
    assert any(result.trace for result in again)
    for change in ({"max_new_tokens": 5}, {}):
        others = everyone if change else asked("pced(gamma=1)")
        with pytest.raises(AssertionError, match="loaded"):
            run_candidates([TASK], others, source=TaskSource(), work=tmp_path, **change)


def test_a_context_is_encoded_once_per_encoding(asked, monkeypatch):
    encoded = []
    encode = LanguageModel.encode
    monkeypatch.setattr(
        LanguageModel, "encode", lambda self, chunks, **m: encoded.extend(chunks) or encode(self, chunks, **m)
    )
    run_candidates([TASK], asked("ape,pced,block,pced(gamma=0)", codecs=["raw", "int8"]), source=TaskSource())
    assert len(encoded) >= 2 * 3
    assert max(Counter(map(tuple, encoded)).values()) == 2  # alone and after the prefix, whatever the engine and codec


def test_a_prompt_that_does_not_fit_is_not_counted(asked):
    long = Task(
        name="long",
        metric="subspan_em",
        max_new_tokens=2,
        examples=[Example(example_id="0", question="Who?", chunks=("word " * 50,) * 4, answers=("",))],
    )
    full, pced = run([long], asked("full,pced"))
    assert (full.value, full.n, full.too_long, full.chunks) == (None, 0, 1, 4)
    assert (pced.n, pced.too_long, pced.difference) == (1, 0, None)


def test_rows_are_means_and_paired_differences(asked):
    everyone = asked("full,ape,block")
    right = {"full": (1, 1, 0), "ape": (0, 1, 0), "block": (1, 1, None)}
    results = [
        ExampleResult(task="small", example=TASK.examples[at], candidate=one, text="", score=value, chunks=3)
        for one in everyone
        for at, value in enumerate(right[one.label])
    ]
    rows = {(row.engine, row.kind): row for row in rows_of([TASK], everyone, results, seed=4, baseline="full")}
    assert list(rows) == [(one.label, kind) for kind in ("", "even", "odd") for one in everyone]
    whole = rows["ape", ""]
    expected, apart = (bootstrap_mean([values], 4) for values in ([0, 1, 0], [-1, 0, 0]))
    assert (whole.value, whole.ci95, whole.n, whole.seed) == (expected.value, expected.ci95, 3, 4)
    assert (whole.difference, whole.difference_ci95, whole.baseline) == (apart.value, apart.ci95, "full")
    assert (rows["block", ""].n, rows["block", ""].too_long, rows["block", ""].difference) == (2, 1, 0)
    assert (rows["full", "even"].value, rows["full", ""].baseline) == (0.5, None)
    named = {"task", "engine", "metric", "value", "n", "ci95", "seed"}
    assert named <= rows["ape", ""].to_json().keys() == {each.name for each in fields(whole)} - {"candidate"}


def test_the_baseline_is_of_the_same_model_and_ranking(asked):
    everyone = asked("full,ape", retrievals=["bm25", "given"], codecs=["raw", "int8"])
    for one in everyone:
        full, ape = (baseline_of(one, everyone, name) for name in ("full", "ape"))
        assert (full is None) is (one.engine == "full")
        assert full is None or (full.engine, full.retrieval) == ("full", one.retrieval)
        if one.engine == "ape":
            assert (ape is None) is (one.codec == "raw")
            assert ape is None or (ape.codec, ape.retrieval) == ("raw", one.retrieval)
    assert baseline_of(everyone[0], everyone, "pced") is None


def test_prompts_differ_by_candidate(asked):
    bare, own = asked('ape(prompt.system="", prompt.context=""),ape')
    assert (bare.label, own.label) == ('ape(prompt.system="", prompt.context="")', "ape")
    assert (bare.prompt.system, own.prompt.system != "") == ("", True)
    with pytest.raises(ConfigError, match="sytem"):
        asked("ape(prompt.sytem=a)")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "fool"}, "full, ippd"),
        ({"engine": "pced", "options": {"gama": 1}}, "gamma"),
        ({"engine": "pced", "options": {"gamma": "much"}}, "gamma"),
        ({"engine": "ape", "options": {"temperature": 9}}, "temperature"),
        ({"engine": "ape", "codec": "mp3"}, "mp3"),
        ({"engine": "ape", "retrieval": "best"}, "given, dense"),
        ({"engine": "ape", "top_k": 3}, "--retrieval"),
        ({"engine": "ape", "retrieval": "bm25", "top_k": 0}, "--top-k"),
    ],
)
def test_what_no_candidate_can_be(settings, message):
    with pytest.raises(UsageError, match=message):
        Candidate(**settings)


def test_the_best_chunks_are_read(asked):
    [one] = run_candidates([TASK], asked("pced", retrievals=["bm25"], top_k=1), source=TaskSource())[:1]
    assert {winner for _, winner in one.trace} == {0}
    assert one.chunks == 1


def test_candidates_with_and_without_the_reranker(model_folder):
    specs = parse_specs("full")
    found = all_candidates(specs, models=[str(model_folder)], retrievals=["bm25"], rerank=[False, True])
    assert [each.rerank for each in found] == [False, True]


def test_questions_of_an_index_are_answered_as_it_answers(rag):
    task = Task(
        name="mine",
        metric="subspan_em",
        max_new_tokens=5,
        examples=[Example(example_id="0", question=QUESTIONS[0], chunks=(), answers=("x",))],
    )
    everyone = all_candidates(
        parse_specs("full,block,pced"),
        models=[rag.config.model],
        retrievals=[rag.config.retrieval],
        top_k=2,
        tuning=rag.config.tuning,
        prompt=rag.config.prompt,
    )
    for engine in ("full", "block", "pced"):  # an index's first question stores the KV of the prompt's prefix
        rag.query(QUESTIONS[0], engine=engine, top_k=2, max_new_tokens=5)
    rag.index.write_behind.settle(whole=True)
    before = replace(rag.store.stats(), used_bytes=0)  # LMDB's free pages come and go
    results = run_candidates([task], everyone, source=IndexSource(rag))
    assert replace(rag.store.stats(), used_bytes=0) == before
    for result in results:
        answer = rag.query(QUESTIONS[0], engine=result.candidate.engine, top_k=2, max_new_tokens=5)
        assert (result.text, result.chunks) == (answer.text, len(answer.sources))
    with pytest.raises(UsageError, match="given order"):
        run_candidates([task], all_candidates(parse_specs("full"), models=[rag.config.model]), source=IndexSource(rag))


def test_two_tasks_of_one_name_are_refused(asked):
    with pytest.raises(UsageError, match="small"):
        run([TASK, TASK], asked("full"))


LONG = " ".join(CHUNKS)


def test_answers_by_other_retaining_heads_are_asked_again(tmp_path, model_folder, asked, monkeypatch):
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    model = load_model(str(folder), device="cpu")
    task = Task(name="long", metric="subspan_em", examples=[replace(TASK.examples[0], chunks=(LONG,))])
    spec = parse_specs("apb(block=20, anchor=6, passing=3)")
    asked_again = []
    submit = Runtime.submit
    monkeypatch.setattr(Runtime, "submit", lambda *a, **more: asked_again.append(1) or submit(*a, **more))
    for seed, times in ((None, 1), (None, 1), (0, 2), (1, 3), (1, 3)):
        if seed is not None:
            torch.manual_seed(seed)
            RetainingHeads(widths_of(model), 8).save(folder / HEADS)
        run_candidates(
            [task],
            all_candidates(spec, models=[str(folder)]),
            source=TaskSource(),
            max_new_tokens=2,
            work=tmp_path / "work",
        )
        assert len(asked_again) == times


TEXTS = (
    "Bolt Ltd makes valves for ships in Varn.",
    "Corvo Mills was founded by Ida Brandt.",
    "Halden Works was founded by Mira Oskel in 1907.",
    "Ulm lies far away.",
)
SEARCHED = "Who founded Halden Works in Varn?"


def test_scores_are_those_of_an_index(tmp_path, model_folder, monkeypatch):
    words.install(monkeypatch)
    settings = {"model": model_folder, "embedder": "words", "reranker": "words", "chunk_tokens": 128}
    source = TaskSource(embedder="words", reranker="words", device="cpu")
    with indexed(tmp_path, {f"{number}.txt": text for number, text in enumerate(TEXTS)}, **settings) as rag:
        for mode, rerank in itertools.product(MODES, (False, True)):
            found = rag.retrieve(SEARCHED, top_k=len(TEXTS), retrieval=mode, rerank=rerank)
            ranked = source.rank(SEARCHED, TEXTS, mode, rerank=rerank)
            assert sorted(index for index, _ in ranked) == [0, 1, 2, 3]
            assert ranked[-1][0] == 2
            own = {each.chunk.text: each.score for each in found}
            assert {TEXTS[index]: score for index, score in ranked} == dict.fromkeys(TEXTS, 0.0) | own
            # a hybrid ranks by fused ranks
            assert ranked == sorted(ranked, key=lambda pair: pair[1]) or mode == "hybrid"


def test_given_chunks_are_equal_and_keep_their_order():
    assert TaskSource().rank(SEARCHED, TEXTS, "given", rerank=False) == [(i, 1 - 1e-8) for i in range(4)]


def test_what_a_mode_needs_is_asked_for_before_anything_is_loaded():
    for mode, rerank, message in (("dense", False, "--embedder"), ("bm25", True, "--reranker")):
        with pytest.raises(UsageError, match=message):
            TaskSource().check(Candidate(engine="full", retrieval=mode, rerank=rerank))
    TaskSource().check(Candidate(engine="full", retrieval="bm25"))


def test_a_context_is_embedded_once_for_all_modes_and_questions(monkeypatch):
    made = CountingEmbedder()
    words.install(monkeypatch, embedder=lambda **_: made)
    source = TaskSource(embedder="words", device="cpu")
    for mode in ("dense", "sparse", "colbert"):
        for question in (SEARCHED, "What does Bolt Ltd make?"):
            for _ in range(2):
                source.rank(question, TEXTS, mode, rerank=False)
    assert made.texts == [*TEXTS]
