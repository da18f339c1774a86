"""The cost of a step: where the host waits for the device, and how often a chunk is read."""

from __future__ import annotations

import functools
import gc
import shutil
import weakref
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace

import pretend
import pytest
import torch
from asking import request
from crowd import Asked, generation
from crowd import Recorder as Quiet
from crowd import engine as engine_of
from crowd import request as request_of
from indexed import indexed
from torch.utils._python_dispatch import TorchDispatchMode

import ragkv.attention.partial
from ragkv import RagKV
from ragkv.decoding import Decoding
from ragkv.engines import Engine, PlacedChunk, TokenSequence, answer_from, engine_class, engine_names, make_engine
from ragkv.runtime import Generation, Runtime, runtime_of
from ragkv.types import Encoding

ENGINES = [name for name in engine_names() if engine_class(name).__module__.startswith("ragkv.")]
FAMILIES = ("llama-long", "gemma2-short")
TUNED = [
    ("ape", {"temperature": 0.7, "scale": 0.8}),
    ("ape", {"temperature": 0.7, "scale": 0.8, "scale_mode": "log"}),
    ("blend", {"ratio": 0.5}),
    ("blend", {"preset": "cacheblend", "ratio": 0.5}),
    ("blend", {"preset": "epic", "first": 2}),
    ("block", {"sink": "none"}),
    ("block", {"preset": "no-positions"}),
    ("pced", {"beta": "shared"}),
    ("pced", {"beta": "released"}),
    ("pced", {"beta": 0.3}),
    ("pced", {"aggregation": "moe"}),
    ("pced", {"aggregation": "poe", "beta": "shared", "group_experts": 2}),
]
QUESTION = "Who founded Halden Works?"
TOKENS = 3
CHOSEN = "ragkv/runtime/step.py Stepper._fetched"
"""The only place where the host waits for the device during decoding: it reads the tokens of all requests."""


def on_both(names, cells, second):
    """Parametrize over both families; `make test` runs those of the second whose engine is in `second`."""
    return pytest.mark.parametrize(
        ("family", *names),
        [
            pytest.param(family, *cell, marks=[pytest.mark.nightly] * (family != FAMILIES[0] and cell[0] not in second))
            for family in FAMILIES
            for cell in cells
        ],
    )


@pytest.fixture(scope="module")
def opened(make_folder, tmp_path_factory, pretend_device):
    """An index of one family over a few sentences, built on the CPU with a small random model, and opened on both
    devices.
    """
    with ExitStack() as stack:

        @functools.cache
        def made(family):
            texts = {
                "halden.md": "Halden Works was founded by Mira Oskel in 1907.\n\nIt is based in Tarn.\n",
                "bolt.txt": "Bolt Ltd makes valves. Bolt Ltd was founded by Ann Lee in Varn.",
            }
            settings = {"codec": "raw", "chunk_tokens": 64}
            with indexed(tmp_path_factory.mktemp("index"), texts, model=make_folder(family), **settings) as rag:
                place = rag.folder
            here = stack.enter_context(RagKV.open(place, device="cpu", readonly=True))
            return here, stack.enter_context(RagKV.open(place, device=pretend_device))

        yield made


@pytest.fixture
def rags(family, opened):
    """The index on the CPU and on the device."""
    return opened(family)


def ask(rag, engine, **options):
    return rag.query(QUESTION, engine=engine, top_k=3, max_new_tokens=TOKENS, **options)


def test_the_pretend_device_refuses_and_counts_as_cuda_does(pretend_device):
    """The tests below rely on this."""
    there = torch.arange(12.0).reshape(3, 4).to(pretend_device)
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"Expected .*device"):
        there + torch.ones(3, 4)
    with torch.inference_mode(), pretend.counting() as waits:
        there.sum().item(), there[there > 3]
        there.to(pretend_device).copy_(torch.ones(3, 4), non_blocking=True)
    assert [(c.op, c.bytes) for c in waits.blocking] == [("_local_scalar_dense", 4), ("index", 32)]
    assert [(c.bytes, c.blocking) for c in waits.uploads] == [(48, False)]


def waited(step):
    return Counter(f"{crossing.place.partition(':')[0]} {crossing.function}" for crossing in step.blocking)


def numbers_alone(step):
    """Only ids, positions, indices and group weights; no KV, which has the width of a head."""
    return all(c.dtype in (torch.bool, torch.int64) or c.bytes < 256 for c in (*step.reads, *step.uploads))


@on_both(["engine"], [(name,) for name in ENGINES], ("ape", "block", "ippd", "pced"))
def test_the_answer_is_that_of_the_cpu_and_a_step_waits_for_the_chosen_tokens_alone(engine, rags):
    """Once between two forward passes, for every engine; also after the context is laid out."""
    here, there = rags
    ask(there, engine)  # its KV is in the device's memory from now on
    with pretend.counting(there.model) as waits:
        results = ask(there, engine)
    assert len(waits.steps) > TOKENS
    once = [waited(step) for step in waits.steps[1:]]
    if engine == "blend":
        once.remove({})  # the recomputing pass: no token is chosen after it
    assert once == [{CHOSEN: 1}] * len(once)
    assert all(map(numbers_alone, waits.steps[1:]))
    expected = ask(here, engine)
    assert (results.text, results.finish_reason) == (expected.text, expected.finish_reason)
    assert [source.tokens_won for source in results.sources] == [source.tokens_won for source in expected.sources]


@on_both(["engine", "tuning"], TUNED, ("ape", "blend"))
def test_every_setting_gives_the_tokens_of_the_cpu_and_makes_no_step_wait(engine, tuning, rags):
    output = make_engine(engine, {engine: tuning})

    def answer(model):
        wanted = request(model, output)
        with pretend.counting(model) as waits:
            return list(runtime_of(model).decode(output, wanted, Generation(max_new_tokens=3))), waits

    (expected, _), (found, waits) = (answer(rag.model) for rag in rags)
    assert found == expected
    groups = 2 if tuning.get("group_experts") else 1
    # tokens to recompute are selected first, unless they are fixed; no token is chosen after the recomputing pass
    before = [] if engine != "blend" else [{}] if tuning.get("preset") == "epic" else [{CHOSEN: 1}, {}]
    assert [waited(step) for step in waits.steps] == [{}, *before, *([{}] * (groups - 1) + [{CHOSEN: 1}]) * 3]


@pytest.mark.parametrize("family", FAMILIES[:1])
def test_a_drawn_token_is_that_of_the_cpu_and_waited_for_once(rags):
    here, there = rags
    drawn = {"temperature": 0.9, "top_p": 0.9, "min_p": 0.01, "top_k_tokens": 40, "seed": 4}
    drawn |= {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    ask(there, "block", decoding=drawn)
    with pretend.counting(there.model) as waits:
        found = ask(there, "block", decoding=drawn)
    assert all(waited(step) == {CHOSEN: 1} for step in waits.steps[1:])
    assert found.text == ask(here, "block", decoding=drawn).text


@pytest.mark.parametrize("family", FAMILIES[:1])
def test_many_requests_are_waited_for_once(rags):
    """Questions of all engines, greedy and sampled, in the same steps; each answer equals the CPU's."""
    here, there = rags

    def jobs(rag):
        for at, engine in enumerate(("single", "ape", "block", "full") * 2):
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


@on_both(["engine"], [("ape",), ("block",)], ("block",))
def test_stored_kv_crosses_once(engine, rags, tmp_path, pretend_device, monkeypatch):
    copy = shutil.copytree(rags[0].folder, tmp_path / "index")  # its KV is not in memory
    with RagKV.open(copy, device=pretend_device) as rag:
        with pretend.counting(rag.model) as waits:
            answer = ask(rag, engine)
        assert answer.kv.misses == 0
        crossed = [c for c in waits.uploads if c.dtype == torch.uint8 and c.place.startswith("ragkv/attention/kv.py")]
        assert sum(crossing.bytes for crossing in crossed) == answer.kv.bytes
        assert len(crossed) == answer.kv.hits  # one copy per record
        assert not any(crossing.blocking for crossing in crossed)
        assert len({crossing.step for crossing in crossed}) == 1  # before the prefill; none during decoding
        ask(rag, engine)  # the prefix, which the first question computed, comes from the store
        with pretend.counting(rag.model) as waits:
            ask(rag, engine)
        assert not [c for c in waits.uploads if c.place.startswith("ragkv/attention/kv.py")]


@pytest.mark.parametrize("codec", ["half", "q8"])
def test_packed_kv_crosses_and_is_kept_packed(codec, make_folder, tmp_path, pretend_device):
    """It is unpacked once for all simultaneous questions; their answers equal the CPU's."""
    text = (
        "Halden Works was founded by Mira Oskel in 1907. Halden Works was sold in 1931. Halden Works is based in Tarn."
    )
    settings = {"model": make_folder("llama"), "codec": codec, "chunk_tokens": 64}
    with indexed(tmp_path, {"halden.txt": text}, **settings) as rag:
        expected = ask(rag, "block")
    with RagKV.open(tmp_path / "index", device=pretend_device) as rag:
        with pretend.counting(rag.model) as waits:
            found = ask(rag, "block")
        assert (found.text, found.kv.misses) == (expected.text, 0)
        loader, sizes = rag.kv_source, rag.index.store.memory(rag.model.place).use()
        crossed = sum(c.bytes for c in waits.uploads if c.dtype == torch.uint8)
        assert crossed == sizes.bytes > 0
        packed = {"half": 4 / 8, "q8": (16 + 2) / 64}[codec]  # the model computes in float32, with head_dim 16
        chunks = [item.chunk for item in rag.retrieve(QUESTION, top_k=3)]
        identities = loader.identities(Encoding.PREFIXED, chunks)
        first, second = (loader.find(identities, lambda _: {})[0] for _ in range(2))
        for item, other in zip(first.values(), second.values(), strict=True):
            assert item is other
            assert not item.packed
            assert item.pages is not None
        held = rag.index.store.memory(rag.model.place).get_many([each.key() for each in identities], lambda _: {})[0]
        assert all(kv.packed and kv.nbytes == kv.wide().nbytes * packed for kv in held.values())
        del first, second, item, other
        again = loader.find(identities, lambda _: {})[0]
        assert len(again) > 1
        assert all(kv.pages is not None for kv in again.values())


def test_an_index_that_is_made_on_the_device(tmp_path, pretend_device):
    """Ingest, embedder and reranker on the device: with the mini models, the answer equals the CPU's."""
    texts, answers = {"halden.txt": "Halden Works was founded by Mira Oskel in 1907."}, []
    for device in ("cpu", pretend_device):
        with indexed(tmp_path / device.partition(":")[0], texts, device=device) as rag:
            answers.append(rag.query(QUESTION, engine="block", max_new_tokens=3))
    assert answers[1].text == answers[0].text
    assert answers[1].sources[0].score == pytest.approx(answers[0].sources[0].score, abs=1e-5)


class Reads:
    """Calls of `partial_attention` over stored KV: (layer's keys, T) of each, step by step."""

    def __init__(self, monkeypatch, model, stored):
        self.steps = []
        where = {key.data_ptr(): (kv, layer) for kv in stored for layer, key in enumerate(kv.keys)}
        partial, step = ragkv.attention.partial.partial_attention, model.step

        def counted(query, key, value, **more):
            found = where.get(key.data_ptr())
            if found is not None:
                self.steps[-1][found[0], found[1], more.get("temperature", 1.0)] += 1
            return partial(query, key, value, **more)

        def stepped(*args, **more):
            self.steps.append(Counter())
            return step(*args, **more)

        monkeypatch.setattr(ragkv.attention.partial, "partial_attention", counted)
        monkeypatch.setattr(model, "step", stepped)


def orders_of(name, tuning=(), chunks=None):
    """Questions over overlapping chunks in different orders, so at different offsets."""
    orders = chunks or [(7, 6, 5), (6, 7), (5, 6, 7), (7,), (6, 5), (5, 7, 6)]
    return [Asked(engine=(name, tuning), chunks=order, suffix=(80 + i, 81), steps=4) for i, order in enumerate(orders)]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize(
    ("name", "tunings"),
    [
        ("block", [()]),
        ("block", [(("sink", "bos"),)]),
        ("ape", [()]),
        ("ape", [(("temperature", 0.9), ("scale", 0.9))]),
        ("ape", [(("temperature", 0.9),), (("temperature", 0.7),)]),  # once per temperature
        ("pced", [()]),
    ],
)
@pytest.mark.usefixtures("without_kernel")
def test_each_chunk_is_read_once_per_layer_and_step(family, name, tunings, make_model, monkeypatch):
    model, asked = make_model(family), [item for tuning in tunings for item in orders_of(name, tuning)]
    requests = [request_of(model, item) for item in asked]
    stored = {id(kv): kv for r in requests for kv in (r.prefix, *(c.kv for c in r.chunks))}.values()
    reads = Reads(monkeypatch, model, stored)
    runtime = Runtime(model)
    jobs = [
        runtime.submit(engine_of(item), r, generation(item, Quiet())) for item, r in zip(asked, requests, strict=True)
    ]
    while runtime.advance():
        continue
    assert all(job.ended and job.error is None for job in jobs)
    assert reads.steps[0]
    for step in reads.steps:
        assert set(step.values()) <= {1}
    chunks = {id(kv) for r in requests for c in r.chunks for kv in [c.kv]}
    assert {id(kv) for kv, _, _ in reads.steps[0]} >= chunks
    wanted = {dict(tuning).get("temperature", 1.0) for tuning in tunings}
    assert {temperature for step in reads.steps for _, _, temperature in step} <= wanted | {1.0}  # 1: the prefix


class Allocated(TorchDispatchMode):
    """Allocated bytes: in total, of the largest tensor, and at the peak."""

    def __init__(self):
        super().__init__()
        self.live = self.most = 0
        self._known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage.data_ptr()
                if key and key not in self._known:
                    self._known.add(key)
                    self.live += storage.nbytes()
                    self.most = max(self.most, self.live)
                    weakref.finalize(storage, self._gone, key, storage.nbytes())
        return result

    def _gone(self, key, size):
        self._known.discard(key)
        self.live -= size


def _peak(model, questions, context):
    """The peak of allocated bytes while this many questions over one context of random KV are answered."""
    generator = torch.Generator().manual_seed(1)
    [kv] = model.encode([torch.randint(3, 300, (context,), generator=generator).tolist()])
    runtime = Runtime(model)

    class Over(Engine):
        name, encoding, Config = "over", None, dict

        def program(self, request, model):
            row = TokenSequence.over((PlacedChunk(kv=kv, start=3),), position=3 + context)
            return answer_from(row, request.suffix_ids)

    asked = orders_of("full", chunks=[()])[0]
    with Allocated() as allocated:
        for _ in range(questions):
            runtime.submit(Over(), request_of(model, asked), Generation(max_new_tokens=3))
        while runtime.advance():
            continue
    return allocated.most


def test_memory_does_not_grow_with_questions_times_context(make_model):
    model = make_model("llama-long")
    model.eos_ids, eos = frozenset(), model.eos_ids
    try:
        few, many = ([_peak(model, questions, context) for context in (400, 3200)] for questions in (2, 24))
    finally:
        model.eos_ids = eos
    token = 2 * 2 * 16 * 4 * 2  # bytes of a token's keys and values in all layers
    grown = (many[1] - many[0]) - (few[1] - few[0])
    assert grown < 22 * 2800 * token / 20  # one copy per question would be twenty times that


def test_rows_that_come_one_after_another_do_not_copy_the_context_each(make_model):
    """Every question has the chunks in another order, so few are joined, in whatever order the questions come."""
    model = make_model("llama")
    runtime = Runtime(model)
    joined = []
    for one in orders_of("block", chunks=[(7, 6, 5), (6, 7, 5), (5, 6, 7), (7, 5, 6), (6, 5, 7), (5, 7, 6)]):
        long = replace(one, steps=40)
        runtime.submit(engine_of(long), request_of(model, long), Generation(max_new_tokens=40))
        for _ in range(4):
            runtime.advance()
        joined.append(len(runtime.executor._layout._joined))
    assert max(joined) <= 2
    while runtime.advance():
        continue
    gc.collect()
    assert not runtime.executor._layout._joined
