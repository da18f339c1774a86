"""Every engine answers on a device as on the CPU, and nothing but what is listed here makes the host wait for it."""

from __future__ import annotations

import shutil
from collections import Counter

import pretend
import pytest
import torch
from asking import run

from ragkv import RagKV
from ragkv.engines import engine_class, engine_names

ENGINES = ("all", "ape", "block", "full", "mapreduce", "pced", "single")
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

PASS = {
    "ragkv/attention/context.py AttentionRun.__post_init__": 2,
    "transformers/masking_utils.py find_packed_sequence_indices": 1,  # for each kind of mask
}
STREAM = PASS | {"ragkv/engines/base.py CausalStream._read": 1, "ragkv/engines/base.py Stream.best": 1}
WAITS = dict.fromkeys(ENGINES, STREAM) | {
    "pced": PASS
    | {
        "ragkv/engines/pced.py ExpertStream.best": 3,
        "ragkv/engines/pced.py ExpertStream.winner": 1,
        "ragkv/engines/pced.py _Batch.read": 1,
    },
    "mapreduce": STREAM | {"ragkv/engines/mapreduce.py MapReduce.summaries": 1},
}
"""Where, and how often, the host waits for the device between one forward pass and the next while it decodes."""


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


@pytest.mark.parametrize("engine", ENGINES)
def test_waits_per_step(engine, rags):
    """Of whole steps: a forward pass over new tokens, what is made of its logits, and the next one's input."""
    _, there = rags
    ask(there, engine)  # its KV is in the device's memory now
    with pretend.counting(there.model) as waits:
        ask(there, engine)
    listed = Counter(WAITS[engine])
    listed["transformers/masking_utils.py find_packed_sequence_indices"] *= 1 + bool(there.model.windows)
    assert len(waits.steps) > 4
    for step in waits.steps[2:-1]:
        found = Counter(f"{crossing.place.partition(':')[0]} {crossing.function}" for crossing in step.blocking)
        assert found <= listed, f"not listed: {found - listed}"
        assert {crossing.dtype for crossing in (*step.reads, *step.uploads)} <= {torch.bool, torch.int64}  # no KV


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
