"""Every engine answers on a device as on the CPU, and nothing but what is listed here makes the host wait for it."""

from __future__ import annotations

import shutil
from collections import Counter

import pretend
import pytest
import torch
from asking import request, run

from ragkv import RagKV
from ragkv.decoding import Decoding
from ragkv.engines import engine_class, engine_names, make_engine
from ragkv.runtime import Generation, runtime_of

ENGINES = ("all", "apb", "ape", "block", "full", "ippd", "ippd-stacked", "mapreduce", "pced", "single")
FAMILIES = ("llama-long", "gemma2-short")
TUNED = [
    ("ape", {"temperature": 0.7, "scale": 0.8}),
    ("ape", {"temperature": 0.7, "scale": 0.8, "scale_mode": "log"}),
    ("block", {"sink": "none"}),
    ("block", {"preset": "no-positions"}),
    ("pced", {"beta": "shared"}),
    ("pced", {"beta": "released"}),
    ("pced", {"beta": 0.3}),
    ("pced", {"aggregation": "moe"}),
    ("pced", {"aggregation": "poe", "beta": "shared", "group_experts": 2}),
]
QUESTION = "Who founded Halden Works?"
TOKENS = 6

CHOSEN = "ragkv/runtime/stepper.py Stepper._choose"
"""The one place where the host waits for the device while tokens are generated: it is told those of all requests."""


@pytest.fixture(scope="module", params=FAMILIES)
def index(request, make_folder, tmp_path_factory):
    """An index over a few sentences, made on the CPU with a small random model."""
    place, documents = tmp_path_factory.mktemp("index") / "index", tmp_path_factory.mktemp("documents")
    (documents / "halden.md").write_text("Halden Works was founded by Mira Oskel in 1907.\n\nIt is based in Tarn.\n")
    (documents / "bolt.txt").write_text("Bolt Ltd makes valves. Bolt Ltd was founded by Ann Lee in Varn.")
    model, tuning = str(make_folder(request.param)), {"mapreduce": {"summary_tokens": 4}}
    with RagKV.create(place, model=model, device="cpu", chunk_tokens=64, tuning=tuning) as rag:
        rag.ingest(documents)
    return place


@pytest.fixture(scope="module")
def rags(index, pretend_device):
    """The index on the CPU and on the device."""
    with RagKV.open(index, device="cpu", readonly=True) as here, RagKV.open(index, device=pretend_device) as there:
        yield here, there


def ask(rag, engine, **options):
    return rag.query(QUESTION, engine=engine, top_k=3, max_new_tokens=TOKENS, **options)


def test_no_engine_is_forgotten():
    assert set(ENGINES) == {name for name in engine_names() if engine_class(name).__module__.startswith("ragkv.")}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_answer_is_that_of_the_cpu(engine, rags):
    here, there = (ask(rag, engine) for rag in rags)
    assert (there.text, there.finish_reason) == (here.text, here.finish_reason)
    assert [source.tokens_won for source in there.sources] == [source.tokens_won for source in here.sources]


def test_a_drawn_answer_is_that_of_the_cpu(rags):
    drawn = {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 4}
    here, there = (ask(rag, "block", decoding=drawn) for rag in rags)
    assert there.text == here.text


@pytest.mark.parametrize(("engine", "tuning"), TUNED)
def test_every_setting_gives_the_tokens_of_the_cpu(engine, tuning, rags):
    here, there = (run(rag.model, engine, tuning=tuning, steps=3) for rag in rags)
    assert there == here


def waited(step):
    return Counter(f"{crossing.place.partition(':')[0]} {crossing.function}" for crossing in step.blocking)


def numbers_alone(step):
    """Ids, positions, indices and the weights of groups; no KV, which is as wide as a head."""
    return all(c.dtype in (torch.bool, torch.int64) or c.bytes < 256 for c in (*step.reads, *step.uploads))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_waits_for_the_chosen_tokens_alone(engine, rags):
    """From one forward pass to the next: once, whatever the engine; also when the context is laid out."""
    _, there = rags
    ask(there, engine)  # its KV is in the device's memory now
    with pretend.counting(there.model) as waits:
        ask(there, engine)
    assert len(waits.steps) > TOKENS
    for step in waits.steps[1:]:
        assert waited(step) == {CHOSEN: 1}
        assert numbers_alone(step)


@pytest.mark.parametrize(("engine", "tuning"), TUNED)
def test_no_setting_makes_a_step_wait(engine, tuning, rags):
    _, there = rags
    runtime, made = runtime_of(there.model), make_engine(engine, {engine: tuning})
    wanted = request(there.model, made)
    with pretend.counting(there.model) as waits:
        list(runtime.decode(made, wanted, Generation(max_new_tokens=3)))
    groups = 2 if tuning.get("group_experts") else 1
    assert [waited(step) for step in waits.steps] == [{}, *([{}] * (groups - 1) + [{CHOSEN: 1}]) * 3]


def test_a_drawn_token_is_waited_for_once(rags):
    _, there = rags
    drawn = {"temperature": 0.9, "top_p": 0.9, "min_p": 0.01, "top_k_tokens": 40, "repetition_penalty": 1.2, "seed": 4}
    ask(there, "block", decoding=drawn)
    with pretend.counting(there.model) as waits:
        ask(there, "block", decoding=drawn)
    assert all(waited(step) == {CHOSEN: 1} for step in waits.steps[1:])


def test_many_requests_are_waited_for_once(rags):
    """Questions of all engines, greedy and drawn, in the same steps; each answer is the CPU's."""
    here, there = rags

    def jobs(rag):
        for at, engine in enumerate(("all", "ape", "block", "full") * 2):
            decoding = Decoding(temperature=0.8, seed=at) if at > 3 else Decoding()
            made = make_engine(engine, {})
            generation = Generation(max_new_tokens=4, decoding=decoding)
            yield runtime_of(rag.model).submit(made, request(rag.model, made), generation)

    def answers(rag, started):
        return [[token.token_id for token in runtime_of(rag.model).tokens(job)] for job in started]

    started = list(jobs(there))
    with pretend.counting(there.model) as waits:
        found = answers(there, started)
    assert [waited(step) for step in waits.steps] == [{}, *[{CHOSEN: 1}] * 4]
    assert found == [answers(here, [job])[0] for job in jobs(here)]


@pytest.mark.parametrize("engine", ["ape", "block", "pced"])
def test_stored_kv_crosses_once(engine, index, tmp_path, pretend_device):
    copy = shutil.copytree(index, tmp_path / "index")  # nobody has its KV in memory
    with RagKV.open(copy, device=pretend_device) as rag:
        with pretend.counting(rag.model) as waits:
            answer = ask(rag, engine)
        assert answer.kv.misses == 0
        crossed = [c for c in waits.uploads if c.dtype == torch.float32 and c.place.startswith("ragkv/attention/kv.py")]
        assert sum(crossing.bytes for crossing in crossed) == answer.kv.bytes
        assert len({crossing.step for crossing in crossed}) == 1  # before the question is read, none with the tokens
        ask(rag, engine)  # the prefix, which the first question made anew, comes from the store
        with pretend.counting(rag.model) as waits:
            ask(rag, engine)
        assert not [c for c in waits.uploads if c.place.startswith("ragkv/attention/kv.py")]


def test_an_index_that_is_made_on_the_device(tmp_path, pretend_device):
    """Ingest, the embedder and the reranker too: the mini models' answer is the CPU's."""
    (tmp_path / "halden.txt").write_text("Halden Works was founded by Mira Oskel in 1907.")
    answers = []
    for device in ("cpu", pretend_device):
        with RagKV.create(tmp_path / device.partition(":")[0], model="mini", device=device) as rag:
            rag.ingest(tmp_path / "halden.txt")
            answers.append(rag.query(QUESTION, engine="block", max_new_tokens=3))
    assert answers[1].text == answers[0].text
    assert answers[1].sources[0].score == pytest.approx(answers[0].sources[0].score, abs=1e-5)
