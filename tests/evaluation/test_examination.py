"""Contenders on tasks: answers are the pipeline's own, nothing is asked twice, figures are those of the answers."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace

import pytest
import torch

from ragkv import RagKV
from ragkv.config import IndexConfig
from ragkv.engines import ContextChunk
from ragkv.errors import ConfigError, UsageError
from ragkv.evaluation import loadedmodel
from ragkv.evaluation.answerer import Contender, contenders
from ragkv.evaluation.examination import examine, run
from ragkv.evaluation.example import Example, Task
from ragkv.evaluation.ranking import mean
from ragkv.evaluation.reader import bit_equal
from ragkv.evaluation.result import Result, baseline_of, rows_of
from ragkv.evaluation.source import IndexSource
from ragkv.evaluation.spec import parse_specs
from ragkv.index.contexts import Contexts
from ragkv.index.task import settle_task
from ragkv.model.apb.heads import RetainingHeads, widths_of
from ragkv.model.checkpoint import HEADS
from ragkv.model.language import LanguageModel
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
ENGINES = "full,single,ape,ape(temperature=0.4, scale=0.7),block,pced(gamma=0.5),mapreduce(summary_tokens=4)"


@pytest.fixture
def asked(model_folder):
    def make(engines: str = ENGINES, **settings):
        return contenders(parse_specs(engines), models=[str(model_folder)], **settings)

    return make


def test_answers_are_those_of_the_pipeline(tmp_path, model_folder, asked):
    settings = {"model": str(model_folder), "device": "cpu", "chunk_tokens": 128}
    tuning = {"ape": {"temperature": 0.4, "scale": 0.7}, "pced": {"gamma": 0.5}, "mapreduce": {"summary_tokens": 4}}
    everyone = asked(ENGINES, retrievals=["bm25"], codecs=["raw", "int8"])
    assert len(everyone) == 12  # full and single have no KV that a codec could change
    found = {
        (result.contender.label, result.contender.codec, result.example.question): result
        for result in examine([TASK], everyone)
    }
    for codec in ("raw", "int8"):
        with RagKV.create(tmp_path / codec, codec=codec, tuning=tuning, **settings) as rag:
            chunks = [rag.chunk(text, chunk_id=str(at)) for at, text in enumerate(CHUNKS)]
            for contender in everyone:
                if contender.codec != codec or contender.label == "ape":
                    continue
                for question in QUESTIONS:
                    result = found[contender.label, codec, question]
                    scored = [
                        ScoredChunk(chunk=chunks[at], source="", retrieval_score=0.0, rerank_score=None, score=score)
                        for at, score in reversed(_bm25(question))
                    ]
                    for _ in range(2):  # what the first one encodes goes through the codec for the second
                        answer = rag.query(
                            question, engine=contender.engine, chunks=scored, max_new_tokens=6, keep=True
                        )
                        rag.settle()
                    assert result.text == answer.text
                    if contender.engine == "pced":
                        won = [winner for _, winner in result.trace]
                        assert len(won) >= 1
                        assert set(won) <= {0, 1, 2}
                        counts = {source.chunk_id: source.tokens_won for source in answer.sources}
                        assert {str(at): won.count(at) for at in range(3)} == counts


def _bm25(question):
    from ragkv.evaluation.scorer import Scorer

    return Scorer().rank(question, CHUNKS, "bm25", rerank=False)


def test_a_stopped_run_goes_on_and_a_whole_one_needs_no_model(tmp_path, asked, monkeypatch):
    everyone = asked("full,pced")
    whole = run([TASK], everyone)
    seen = []

    def stop(done, total, what):
        seen.append((done, total, what))
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        examine([TASK], everyone, work=tmp_path, on_progress=stop)
    assert seen == [(0, 6, "small, full"), (1, 6, "small, pced"), (2, 6, "small, full"), (3, 6, "small, pced")]
    counted = []
    decode = Runtime.decode
    monkeypatch.setattr(Runtime, "decode", lambda *args: counted.append(1) or decode(*args))
    assert run([TASK], everyone, work=tmp_path) == whole
    assert len(counted) == 3

    def load(*_args, **_more):
        raise AssertionError("loaded")

    monkeypatch.setattr(loadedmodel.LoadedModel, "model", property(load))
    again = examine([TASK], everyone, work=tmp_path)
    assert rows_of([TASK], everyone, again, baseline="full") == whole
    assert any(result.trace for result in again)
    for change in ({"max_new_tokens": 5}, {}):
        others = everyone if change else asked("pced(gamma=1)")
        with pytest.raises(AssertionError, match="loaded"):
            examine([TASK], others, work=tmp_path, **change)


def test_a_context_is_encoded_once_per_encoding(asked, monkeypatch):
    encoded = []
    from ragkv.model.language import LanguageModel

    encode = LanguageModel.encode
    monkeypatch.setattr(
        LanguageModel, "encode", lambda self, chunks, **m: encoded.extend(chunks) or encode(self, chunks, **m)
    )
    examine([TASK], asked("ape,pced,block,pced(gamma=0)", codecs=["raw", "int8"]))
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
        Result(task="small", example=TASK.examples[at], contender=one, text="", score=value, chunks=3)
        for one in everyone
        for at, value in enumerate(right[one.label])
    ]
    rows = {(row.engine, row.kind): row for row in rows_of([TASK], everyone, results, seed=4, baseline="full")}
    assert list(rows) == [(one.label, kind) for kind in ("", "even", "odd") for one in everyone]
    whole = rows["ape", ""]
    expected, apart = mean([0, 1, 0], 4), mean([-1, 0, 0], 4)
    assert (whole.value, whole.ci95, whole.n, whole.seed) == (expected.value, expected.ci95, 3, 4)
    assert (whole.difference, whole.difference_ci95, whole.baseline) == (apart.value, apart.ci95, "full")
    assert (rows["block", ""].n, rows["block", ""].too_long, rows["block", ""].difference) == (2, 1, 0)
    assert (rows["full", "even"].value, rows["full", ""].baseline) == (0.5, None)
    assert {"task", "engine", "metric", "value", "n", "ci95", "seed"} <= rows["ape", ""].to_json().keys()


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


def test_prompts_differ_by_contender(asked):
    bare, own = asked('ape(prompt.system="", prompt.context=""),ape')
    assert (bare.label, own.label) == ('ape(prompt.system="", prompt.context="")', "ape")
    assert (bare.prompt.system, own.prompt.system != "") == ("", True)
    with pytest.raises(ConfigError, match="sytem"):
        asked("ape(prompt.sytem=a)")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"engine": "fool"}, "full, ippd, ippd-stacked, mapreduce"),
        ({"engine": "pced", "options": {"gama": 1}}, "gamma"),
        ({"engine": "pced", "options": {"gamma": "much"}}, "gamma"),
        ({"engine": "ape", "options": {"temperature": 9}}, "temperature"),
        ({"engine": "ape", "codec": "mp3"}, "mp3"),
        ({"engine": "ape", "retrieval": "best"}, "given, dense"),
        ({"engine": "ape", "top_k": 3}, "--retrieval"),
        ({"engine": "ape", "retrieval": "bm25", "top_k": 0}, "--top-k"),
    ],
)
def test_what_no_contender_can_be(settings, said):
    with pytest.raises(UsageError, match=said):
        Contender(**settings)


def test_the_best_chunks_are_read(asked):
    [one] = examine([TASK], asked("pced", retrievals=["bm25"], top_k=1))[:1]
    assert {winner for _, winner in one.trace} == {0}
    assert one.chunks == 1


def test_questions_of_an_index_are_answered_as_it_answers(rag):
    task = Task(
        name="mine",
        metric="subspan_em",
        max_new_tokens=5,
        examples=[Example(example_id="0", question=QUESTIONS[0], chunks=(), answers=("x",))],
    )
    everyone = contenders(
        parse_specs("full,block,pced"),
        models=[rag.config.model],
        retrievals=[rag.config.retrieval],
        top_k=2,
        prompt=rag.config.prompt,
    )
    before = rag.stats()
    results = examine([task], everyone, source=IndexSource(rag, device="cpu"))
    assert rag.stats() == before
    for result in results:
        answer = rag.query(QUESTIONS[0], engine=result.contender.engine, top_k=2, max_new_tokens=5)
        assert (result.text, result.chunks) == (answer.text, len(answer.sources))
    with pytest.raises(UsageError, match="given order"):
        examine([task], contenders(parse_specs("full"), models=[rag.config.model]), source=IndexSource(rag))


def test_two_tasks_of_one_name_are_refused(asked):
    with pytest.raises(UsageError, match="small"):
        run([TASK, TASK], asked("full"))


LONG = " ".join(CHUNKS)
APB = {"block": 20, "anchor": 6, "passing": 3}


@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("options", [{}, {"question": False, "compressor": "key-norm"}, {"compressor": "random"}])
def test_a_long_text_is_read_in_blocks_as_query_reads_a_file(model_folder, asked, codec, options):
    spec = ", ".join(f"{key}={str(value).lower()}" for key, value in {**APB, **options}.items())
    [contender] = asked(f"apb({spec})", codecs=[codec])
    loaded = loadedmodel.LoadedModel(str(model_folder), device="cpu")
    reader = loaded.reader(contender.prompt, codec)
    text = ContextChunk(token_ids=loaded.chunk_ids(reader.prompt, LONG), score=0.5)
    request = reader.request(contender.make(), QUESTIONS[0], [text], whole=True)
    config = IndexConfig(model=str(model_folder), default_engine="apb", tuning={"apb": {**APB, **options}})
    with Contexts(loaded.model, [("long", LONG)], config) as contexts:
        task = settle_task(config, QUESTIONS[0])
        own, _ = contexts.request(task, contexts.find(task, lambda _: None), None, lambda *_: None)
    assert len(own.chunks) == -(-len(text.token_ids) // 20) > 4
    assert [block.token_ids for block in request.chunks] == [block.token_ids for block in own.chunks]
    same = [bit_equal(one.stored(), other.stored()) for one, other in zip(request.chunks, own.chunks, strict=True)]
    assert all(same) if codec == "raw" else not any(same)  # a codec that loses bits


def test_answers_by_other_retaining_heads_are_asked_again(tmp_path, model_folder, asked, monkeypatch):
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    model = LanguageModel.load(str(folder), device="cpu")
    task = Task(name="long", metric="subspan_em", examples=[replace(TASK.examples[0], chunks=(LONG,))])
    spec = parse_specs("apb(block=20, anchor=6, passing=3)")
    asked_again = []
    decode = Runtime.decode
    monkeypatch.setattr(Runtime, "decode", lambda *a, **more: asked_again.append(1) or decode(*a, **more))
    for seed, times in ((None, 1), (None, 1), (0, 2), (1, 3), (1, 3)):
        if seed is not None:
            torch.manual_seed(seed)
            RetainingHeads(widths_of(model), 8).save(folder / HEADS)
        examine([task], contenders(spec, models=[str(folder)]), max_new_tokens=2, work=tmp_path / "work")
        assert len(asked_again) == times
