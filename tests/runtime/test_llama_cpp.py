"""The runtime llama-cpp: its logits beside a dense pass over the same weights, its states in an index, and what it
refuses. Runs where llama-cpp-python is installed (`.ci/run`, docs/llama-cpp.md)."""

import copy
import gc
import json
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from asking import forced, request
from clichild import run_script
from gguffile import finish, read_weights, write_model
from nightly import NIGHTLY
from safetensors.torch import save_file

from ragkv import RagKV
from ragkv.benchmarks.speed.llama_cpp import LlamaCpp, quantised
from ragkv.doctor.compare import ChunkReader
from ragkv.doctor.questions import GoldenQuestion
from ragkv.doctor.report import Doctor
from ragkv.engines import make_engine
from ragkv.errors import ConfigError, KVMismatchError, ModelLoadError, RagkvError, UnsupportedModelError
from ragkv.index.index import runs_by_llama_cpp
from ragkv.index.pack import unpack
from ragkv.index.requirements import model_requirements
from ragkv.mini import embedder_path
from ragkv.model.checkpoint import Checkpoint, resolve
from ragkv.model.language_model import LanguageModel
from ragkv.model.loading import merge_adapter
from ragkv.plan import _record_bytes
from ragkv.runtime import Generation, Runtime, Stream, runtime_of
from ragkv.store import store
from ragkv.store.maintenance.maintenance import Maintenance

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="gguf is not installed")

import gguf

from ragkv.model import llama_cpp
from ragkv.runtime import llama_cpp_executor

ENGINES = ["full", "single", "block", "pced", "ape", "ippd"]
FAMILIES = ["llama", "mistral", "qwen3", "gemma3", "phi3"]
PARTS = {
    "prefix": [0, 40, 41, 42, 43, 44],
    "chunks": [[*range(50, 80)], [*range(90, 127)], [*range(20, 41)]],
    "suffix": [80, 81, 82, 83],
}


@pytest.fixture(scope="module")
def files(make_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")

    def made(family="llama"):
        path = folder / f"{family}.gguf"
        return path if path.exists() else write_model(path, make_model(family))

    return made


@pytest.fixture(scope="module")
def opened(files):
    models = {}

    def made(family="llama", path=None, codec="half"):
        key = family, path, codec
        if key not in models:
            models[key] = load(path or files(family), codec)
        return models[key]

    return made


def load(path, codec="half", **more):
    checkpoint = Checkpoint(name=path.stem, location=str(path.parent), local=True, file=path.name)
    return llama_cpp_executor.load(checkpoint, **{"dtype": "auto", "device": "cpu", "codec": codec, **more})


def divergence(wanted, scores):
    """KL of each row in nats."""
    wanted, scores = wanted.double().log_softmax(-1), scores.double().log_softmax(-1)
    return (wanted.exp() * (wanted - scores)).sum(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_its_logits_are_those_of_a_dense_pass(family, opened, make_model):
    model = opened(family)
    for name in ENGINES:
        engine = make_engine(name, {})
        scores = forced(model, engine, [50, 60], **PARTS)
        assert divergence(forced(make_model(family), engine, [50, 60], **PARTS), scores).max() < 1e-4, name


@pytest.mark.parametrize(("kind", "seed"), [("Q8_0", 1), ("Q4_1", 2), ("Q4_K_M", 3)])
@pytest.mark.parametrize("family", FAMILIES)
def test_quantised_weights_are_used_as_they_are(family, kind, seed, make_model, tmp_path):
    """`full` is llama.cpp's own pass, and rounding products' inputs to 8 bits is all that differs from a dense one."""
    model = make_model(family)
    dense = LanguageModel(copy.deepcopy(model.module), model.tokens._tokenizer, model.checkpoint)
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in dense.module.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.15)
    path = quantised(write_model(tmp_path / "f32.gguf", dense), kind, tmp_path / "model.gguf")
    read_weights(path, dense)
    llama = load(path)
    scores = {name: forced(llama, make_engine(name, {}), [50, 60], **PARTS) for name in ENGINES}
    for name in ENGINES:
        assert divergence(forced(dense, make_engine(name, {}), [50, 60], **PARTS), scores[name]).max() < 1e-2, name
    own = LlamaCpp(path, 512, flash=False)
    prompt = [*PARTS["prefix"], *(i for chunk in PARTS["chunks"] for i in chunk), *PARTS["suffix"]]
    rows = torch.tensor(np.stack([own.read(ids) for ids in (prompt, [50], [60])]))
    own.close()
    assert divergence(rows, scores["full"]).max() < 5e-3


def test_values_of_eight_bits(opened):
    narrow, wide = opened("qwen3", codec="q8"), opened("qwen3")
    assert narrow.kv_shape.token_bytes < 0.8 * wide.kv_shape.token_bytes
    engine = make_engine("block", {})
    scores = forced(narrow, engine, [50, 60], **PARTS)
    assert divergence(forced(wide, engine, [50, 60], **PARTS), scores).max() < 1e-2


def answers(runtime, model, asked, engine, steps=12):
    jobs = [runtime.submit(engine, each, Generation(max_new_tokens=steps)) for each in asked]
    return [[token.token_id for token in runtime.tokens(job)] for job in jobs]


@pytest.mark.parametrize("name", ["full", "block", "pced", "ape", "ippd"])
def test_questions_together_get_the_answers_of_each_alone(name, files, monkeypatch):
    """Also while the context grows, and with the chunks at other places."""
    model, engine = load(files()), make_engine(name, {})
    model.eos_ids = frozenset()
    chunks = PARTS["chunks"]
    orders = [chunks, chunks[::-1], chunks[:1], chunks[1:] * 4]
    asked = [
        request(model, engine, chunks=order, scores=[0.5] * len(order), prefix=PARTS["prefix"], suffix=[80 + i, 81])
        for i, order in enumerate(orders)
    ]
    other = load(files())
    other.eos_ids = frozenset()
    alone = [answers(Runtime(other), model, [each], engine)[0] for each in asked]
    runtime = Runtime(model)
    assert answers(runtime, model, asked, engine) == alone
    assert answers(runtime, model, [asked[1]], engine) == [alone[1]]
    gc.collect()
    runtime.executor.forward([], [])  # takes back what was dropped
    assert model.context.used == 0


def test_a_chunk_that_several_read_is_loaded_once(opened, monkeypatch):
    model, engine, loads = opened(), make_engine("block", {}), []
    asked = [request(model, engine, **PARTS)] * 3
    restored = model.context._restored
    monkeypatch.setattr(model.context, "_restored", lambda *given: loads.append(given) or restored(*given))
    answers(Runtime(model), model, asked, engine)
    assert len(loads) == 4  # the prefix and three chunks


def test_a_context_out_of_sequences_still_answers(files):
    model, other, engine = load(files()), load(files()), make_engine("pced", {})
    model.eos_ids = other.eos_ids = frozenset()
    chunks = [[10 + i, 11, 12 + i] for i in range(20)]
    asked = request(model, engine, chunks=chunks, scores=[0.5] * 20)
    expected = answers(Runtime(other), model, [asked], engine)
    model.context.sequences = 40
    assert answers(Runtime(model), model, [asked], engine) == expected


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"engines": ("blend",)}, "a state that only it reads; use engine"),
        ({"engines": ("apb",)}, "a state that only it reads; use engine"),
        ({"dtype": "float32"}, "leave --dtype out"),
        ({"codec": "int4"}, "--codec half, zstd or q8"),
        ({"encoding": {"context": 64}}, "a state that only it reads; leave it out"),
        ({"device": "vulkan"}, "was built for the processor alone"),
        ({"model": "mini"}, "runs GGUF files"),
    ],
)
def test_what_it_does_not_have_is_refused_by_name(settings, reason, files, tmp_path):
    with pytest.raises((ConfigError, UnsupportedModelError, ModelLoadError), match=reason):
        RagKV.create(tmp_path / "index", **{"model": files(), "executor": "llama-cpp", **settings})
    assert not (tmp_path / "index").exists()


def test_what_reads_tensors_is_refused_by_name_and_not_compared(index):
    for name in ("block", "full"):
        with pytest.raises(UnsupportedModelError, match="make one with --runtime transformers"):
            index.generate_inputs("Who was the last keeper?", engine=name)
    asked = [GoldenQuestion(text="Who was the last keeper?")]
    report = Doctor(index, codecs=["int4"], top_k=2, max_new_tokens=2).examine(asked, source="", seed=0)
    assert (report.questions, report.codecs) == (1, ())


def test_weighed_chunks_and_kept_positions_are_refused(opened):
    model = opened()
    for name, tuning, reason in (
        ("ape", {"temperature": 0.5}, "llama-cpp cannot weigh chunks"),
        ("block", {"preset": "no-positions"}, "another preset of engine 'block'"),
        ("block", {"sink": "bos"}, 'set the sink to "prefix"'),
    ):
        engine = make_engine(name, {name: tuning})
        with pytest.raises(UnsupportedModelError, match=reason):
            forced(model, engine, [], **PARTS)


def copy_facts(source, file, wanted, rename=lambda name: name):
    for field in source.fields.values():
        if wanted(field.name):
            kind, *inner = field.types
            file.add_key_value(rename(field.name), field.contents(), kind, inner[0] if inner else None)


def rewritten(path, to, *, architecture="llama", changes=None, tensor=lambda name, numbers: numbers):
    """A copy of a file with other facts (None: without), or other tensors."""
    source, file, changes = gguf.GGUFReader(path), gguf.GGUFWriter(to, architecture), changes or {}
    left = {"general.architecture", *changes}
    copy_facts(
        source,
        file,
        lambda name: not name.startswith("GGUF.") and name not in left,
        lambda name: name.replace("llama.", f"{architecture}."),
    )
    for name, value in changes.items():
        kinds = [*source.fields[name].types] if name in source.fields else [gguf.GGUFValueType.UINT16]
        if value is not None:
            file.add_key_value(name, value, kinds[0], kinds[1] if kinds[1:] else None)
    for each in source.tensors:
        file.add_tensor(each.name, tensor(each.name, np.array(each.data)))
    finish(file)
    return to


def random_mamba(path, to):
    """With the vocabulary of a file."""
    file, rng = gguf.GGUFWriter(to, "mamba"), np.random.default_rng(7)
    sizes = {"context_length": 512, "embedding_length": 64, "feed_forward_length": 0, "attention.head_count": 0}
    sizes |= {"block_count": 1, "ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16}
    for name, size in (sizes | {"ssm.time_step_rank": 4}).items():
        file.add_uint32(f"mamba.{name}", size)
    file.add_layer_norm_rms_eps(1e-5)
    for field in gguf.GGUFReader(path).fields.values():
        if field.name.startswith("tokenizer."):
            file.add_key_value(
                field.name, field.contents(), field.types[0], field.types[1] if field.types[1:] else None
            )
    shapes = {"attn_norm.weight": (64,), "ssm_in.weight": (256, 64), "ssm_conv1d.weight": (128, 4)}
    shapes |= {"ssm_conv1d.bias": (128,), "ssm_x.weight": (36, 128), "ssm_dt.weight": (128, 4), "ssm_dt.bias": (128,)}
    shapes = {f"blk.0.{name}": shape for name, shape in shapes.items()}
    shapes |= {"blk.0.ssm_a": (128, 16), "blk.0.ssm_d": (128,), "blk.0.ssm_out.weight": (64, 128)}
    shapes |= {"token_embd.weight": (320, 64), "output_norm.weight": (64,), "output.weight": (320, 64)}
    for name, shape in shapes.items():
        numbers = rng.normal(0, 0.2, shape).astype(np.float32)
        file.add_tensor(name, -np.exp(numbers) if name.endswith("ssm_a") else numbers)
    finish(file)
    return to


def hostile_files(path, folder):
    data = path.read_bytes()
    tokens = data.index(b"tokenizer.ggml.tokens") + 21
    weight = data.index(b"blk.0.attn_q.weight") + 19  # number of dimensions, these, type, offset

    def number(at, value, size=8):
        return data[:at] + value.to_bytes(size, "little") + data[at + size :]

    contents = {
        "empty": b"",
        "no magic": b"GGUX" + data[4:],
        "another byte order": data[:4] + data[4:8][::-1] + data[8:],
        "cut in the header": data[:400],
        "cut in the tensors": data[: len(data) // 2],
        "sizes that overflow": data.replace((64).to_bytes(4, "little"), b"\xff\xff\xff\x7f"),
        "many tensors": number(8, 1 << 62),
        "many facts": number(16, 1 << 62),
        "a long name": number(24, 1 << 60),
        "a long list": number(tokens + 8, 1 << 40),
        "a long token": number(tokens + 16, 1 << 40),
        "lists in lists": number(tokens + 4, 9, 4),
        "many dimensions": number(weight, 1 << 20, 4),
        "no rows": number(weight + 4, 0),
        "rows without end": number(weight + 4, 1 << 63),
        "a type that is none": number(weight + 20, 250, 4),
        "a tensor behind the end": number(weight + 24, 1 << 50),
    }
    for name, content in contents.items():
        (folder / f"{name}.gguf").write_bytes(content)
        yield folder / f"{name}.gguf"
    for name, value in {
        "llama.block_count": 100_000,
        "llama.attention.head_count": 0,
        "llama.context_length": 0,
        "tokenizer.ggml.tokens": ["a"] * 320,
        "tokenizer.ggml.model": None,
        "split.count": 2,
    }.items():
        yield rewritten(path, folder / f"{name} {value and 1}.gguf", changes={name: value})
    yield rewritten(path, folder / "another kind.gguf", architecture="mamba")
    yield rewritten(path, folder / "no such kind.gguf", architecture="nonsense")
    yield rewritten(path, folder / "no numbers.gguf", tensor=lambda name, numbers: numbers * np.float32("nan"))


def test_a_model_with_recurrent_layers_is_refused_by_name(files, tmp_path):
    with pytest.raises(UnsupportedModelError, match="has recurrent layers"):
        load(random_mamba(files(), tmp_path / "mamba.gguf"))


def test_hostile_files_are_refused_in_a_sentence(files, tmp_path):
    """Llama.cpp ends its process for some of them."""
    for path in [*hostile_files(files(), tmp_path)][:: 1 if NIGHTLY else 4]:
        with pytest.raises((ModelLoadError, UnsupportedModelError)) as error:
            load(path)
        assert re.fullmatch(r".+\.", str(error.value)), path  # one line


def test_a_file_that_ends_the_process_of_its_trial(files, tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    path.write_bytes(files().read_bytes())
    monkeypatch.setattr(llama_cpp, "_COMMAND", (llama_cpp.sys.executable, "-c", "import os; os.abort()"))
    with pytest.raises(ModelLoadError, match=r"it ends llama\.cpp's process"):
        load(path)


DOCUMENTS = {
    "harbour.txt": "The harbour of Velmo opens at six. The harbour master is Ines Tarrok.",
    "light.txt": "The lighthouse was built in 1871. <eos> Its last keeper was Bram Oduya.",
}


@pytest.fixture
def index(files, tmp_path):
    for name, text in DOCUMENTS.items():
        (tmp_path / name).write_text(text)
    with RagKV.create(tmp_path / "index", model=files(), chunk_tokens=40) as rag:
        assert rag.config.executor == "llama-cpp"  # as the file is GGUF and the package is there
        rag.ingest(*(tmp_path / name for name in DOCUMENTS))
        yield rag


def test_an_index_answers_from_its_states(index):
    for name in ENGINES:
        answer = index.query("Who was the last keeper?", engine=name, max_new_tokens=8)
        assert answer.kv.misses == 0, name
    schema = json.dumps({"type": "object", "properties": {"year": {"type": "integer"}}, "required": ["year"]})
    for name in ("full", "block"):
        text = index.query("When was it built?", engine=name, schema=schema, max_new_tokens=60).text
        assert isinstance(json.loads(text)["year"], int)
    assert index.maintenance.verify().ok


def test_pages_of_states_leave_memory_once_they_are_read(index, monkeypatch):
    """llama.cpp copies them."""
    calls = []
    monkeypatch.setattr(store, "_LARGE_READ_BYTES", 0)
    monkeypatch.setattr(Maintenance, "give_back_pages", lambda maintenance: calls.append(maintenance))
    with RagKV.open(index.folder) as again:
        again.query("Who was the last keeper?", engine="block", max_new_tokens=1)
    assert calls


@pytest.mark.parametrize("over", ["standalone", "prefixed"])
def test_chunks_that_are_deleted_while_a_question_waits_are_encoded_again(over, index):
    """Its states are not in memory until llama.cpp takes them, and then only there, also while the context grows."""
    engine, asked = make_engine("block", {"block": {"over": over}}), "Who was the last keeper?"
    index.model.eos_ids = frozenset()
    scored = index.retrieve(asked)
    make = lambda: index.request(engine, asked, scored)[0]  # noqa: E731
    make()  # stores what is missing
    index.maintenance.settle()
    [expected] = answers(runtime_of(index.model), index.model, [make()], engine, steps=40)
    waiting, running = make(), make()
    assert all(callable(chunk.kv.source) for chunk in waiting.chunks)
    stream = Stream(runtime_of(index.model), engine, running)
    tokens = []
    for step in range(40):
        tokens.append(stream.best())
        stream.advance(tokens[-1])
        if step == 3:
            index.delete(*(stored.document.document_id for stored in index.select()))
            index.model.context._make_room(index.model.context.cells + 1)
    assert tokens == expected
    stream.close()
    del stream, running
    gc.collect()
    assert answers(runtime_of(index.model), index.model, [waiting], engine, steps=40) == [expected]
    assert not any(callable(chunk.kv.source) for chunk in waiting.chunks)


def test_states_of_another_build_are_misses_and_those_of_another_file_refused(index, files, monkeypatch):
    folder = index.folder
    index.close()
    with monkeypatch.context() as patched:
        patched.setattr(llama_cpp, "build", lambda: "0123456789abcdef")
        for misses in (4, 0):  # what was encoded for the first question is stored
            with RagKV.open(folder) as again:
                answer = again.query("Who was the last keeper?", engine="block", max_new_tokens=4)
                assert answer.kv.misses == misses
    content = files().read_bytes()
    files().write_bytes(content + b"another")
    try:
        with RagKV.open(folder) as again, pytest.raises(KVMismatchError):
            again.query("Who was the last keeper?", engine="block", max_new_tokens=4)
    finally:
        files().write_bytes(content)


def test_its_records_are_made_on_demand_evicted_and_shared(index, files, tmp_path):
    asked, names = "Who was the last keeper?", ("block", "pced")
    expected = [index.query(asked, engine=name, max_new_tokens=6).text for name in names]
    tier = {"kv": "on-demand", "tiers": [{"url": f"file://{tmp_path}/objects"}]}
    for number, settings in enumerate([{"kv": "on-demand"}, {"kv_budget": "40KiB"}, tier, tier]):
        folder = tmp_path / str(number)
        with RagKV.create(folder, model=files(), chunk_tokens=40, **settings) as rag:
            rag.ingest(*(tmp_path / name for name in DOCUMENTS))
            answers = [rag.query(asked, engine=name, max_new_tokens=6) for name in names]
            rag.maintenance.settle()
            assert [answer.text for answer in answers] == expected, settings
            assert answers[0].kv.misses == (4, 2, 4, 0)[number], settings
            assert rag.maintenance.verify().ok
            if number != 2:  # the last one finds its KV in the tier, from which it would be deleted too
                rag.delete(*(stored.document.document_id for stored in rag.select()))
                assert rag.store.stats().kv_records <= 1  # the prefix's


def test_a_question_that_is_given_up_leaves_nothing_in_the_context(opened):
    model, engine = opened("qwen3"), make_engine("pced", {})
    runtime = Runtime(model)
    for steps in (0, 1, 3):
        tokens = runtime.decode(
            engine, request(model, engine, scores=[0.5] * 3, **PARTS), Generation(max_new_tokens=90)
        )
        for _ in range(steps):
            next(tokens)
        assert model.context.used or not steps
        tokens.close()
    del tokens
    gc.collect()
    runtime.executor.forward([], [])  # takes back what was dropped
    assert model.context.used == 0


def test_a_renamed_file_is_the_same_model(index, files, tmp_path):
    renamed = tmp_path / "sha256-0123"  # as Ollama names them
    shutil.copy(files(), renamed)
    folder = index.folder
    index.close()
    settings = folder / "ragkv.toml"
    settings.write_text(settings.read_text().replace(str(files()), str(renamed)))
    with RagKV.open(folder) as again:
        assert again.query("Who was the last keeper?", engine="block", max_new_tokens=4).kv.misses == 0


def test_a_pack_answers_and_one_of_another_build_is_encoded_again(index, files, tmp_path, monkeypatch, caplog):
    index.pack(tmp_path / "pack")
    for build, misses in ((None, 0), ("0123456789abcdef", 4)):
        if build is not None:
            monkeypatch.setattr(llama_cpp, "build", lambda build=build: build)
        unpack(tmp_path / "pack", tmp_path / str(build))
        assert ("another build of llama.cpp" in caplog.text) == bool(misses)
        with RagKV.open(tmp_path / str(build)) as there:
            assert there.query("Who was the last keeper?", engine="block", max_new_tokens=4).kv.misses == misses
    with pytest.raises(KVMismatchError, match="another model"):
        unpack(tmp_path / "pack", tmp_path / "other", model=str(files("qwen3")))
    assert unpack(tmp_path / "pack", tmp_path / "mini", model="mini", documents_only=True).encoded == 4


@pytest.mark.parametrize(
    ("device", "expected"),
    [(None, "gpu"), ("cpu", "cpu"), ("cuda", "gpu"), ("metal", "gpu"), ("Vulkan", "gpu"), ("cuda:1", "gpu:1")],
)
def test_a_device_is_handed_through(device, expected, files, tmp_path, monkeypatch):
    """And the embedder, which torch runs, is where torch can."""
    library, options = llama_cpp.library(), []
    monkeypatch.setattr(library, "llama_supports_gpu_offload", lambda: True)
    open_file = library.llama_model_load_from_file
    monkeypatch.setattr(
        library, "llama_model_load_from_file", lambda path, taken: options.append(taken) or open_file(path, taken)
    )
    with RagKV.create(tmp_path / "index", model=files(), embedder="mini", device=device) as rag:
        assert rag.model.file.settings.device == expected
        assert f":{expected[:3]}" in rag.model.file.settings.regime
    [option] = options
    assert (option.n_gpu_layers > 0) == (expected != "cpu")
    assert (option.split_mode, option.main_gpu) == ((0, 1) if expected == "gpu:1" else (1, 0))


def damage(rng, rows):
    """One of the rows of records, changed: (table, key, bytes)."""
    table = rng.choice(["segments", "segments", "kv"])
    key, data = rng.choice(rows[table])
    kind, damaged = rng.choice(["flip", "byte", "cut", "longer", "swap", "zeros"]), bytearray(data)
    place = rng.choice([rng.randrange(len(data)), rng.randrange(min(64, len(data)))])
    if kind == "swap":
        _, damaged = rng.choice([row for row in rows[table] if row[1] != data])
    elif kind in ("flip", "byte"):
        damaged[place] ^= 0xFF if kind == "byte" else 1 << rng.randrange(8)
    elif kind == "cut":
        del damaged[place:]
    elif kind == "longer":
        damaged[place:place] = rng.randbytes(rng.randrange(1, 9))
    else:
        damaged[place : place + 512] = bytes(len(damaged[place : place + 512]))
    return table, key, bytes(damaged)


def test_a_damaged_record_is_encoded_anew_and_never_given_to_llama_cpp(index, monkeypatch):
    """Payload, header and length; the answer stays, and llama.cpp reads whole states alone."""
    expected = index.query("Who was the last keeper?", engine="block", max_new_tokens=6).text
    index.maintenance.settle()
    context, rng, count, whole, loaded = index.model.context, random.Random(7), Counter(), set(), set()
    state, restored = context.state, context._restored
    monkeypatch.setattr(context, "_restored", lambda data, *at: loaded.add(bytes(data)) or restored(data, *at))
    monkeypatch.setattr(context, "state", lambda slot: [data := state(slot), whole.add(bytes(data))][0])
    assert index.query("Who was the last keeper?", engine="block", max_new_tokens=6).kv.misses == 0
    whole |= loaded
    with index.store._live().read() as txn:
        rows = {table: [(bytes(key), bytes(row)) for key, row in txn.scan(table)] for table in ("kv", "segments")}
    for _ in range(200 if NIGHTLY else 12):
        table, key, damaged = damage(rng, rows)
        index.store._live().write(lambda txn, row=(table, key, damaged): txn.put(*row))
        index.store.memory().drop([key for key, _ in rows["kv"]])
        answer = index.query("Who was the last keeper?", engine="block", max_new_tokens=6)
        count[answer.kv.misses] += 1
        assert answer.text == expected, (table, damaged)
        assert loaded <= whole, (table, damaged)
        index.maintenance.settle()
        index.store._live().write(lambda txn: [txn.put(table, *row) for table in rows for row in rows[table]])
    assert index.maintenance.verify().ok
    assert count[1] > count[0], count


def test_a_killed_ingest_is_finished_by_the_next(files):
    count = json.loads(run_script("ingestcrash", "--kills", "2", "--documents", "6", "--model", str(files())))
    assert (count["ended by -9"], count["ended by 130"], count["comparisons"]) == (2, 1, 1)


def test_bytes_that_llama_cpp_does_not_take_are_an_error(opened):
    model = opened()
    [kv] = model.encode([[50, 51, 52]])
    state = kv.data.copy()
    for change in (slice(0, 4), slice(8, 12), slice(12, 16), slice(16, 20)):
        hostile = state.copy()
        hostile[change] = 0x7F
        broken = model.kv_of(hostile, 3, 0)
        with pytest.raises(RagkvError, match="does not take a stored state"):
            forced_over(model, broken)


def forced_over(model, kv):
    from ragkv.attention.kv import PlacedChunk
    from ragkv.attention.sequence import TokenSequence

    return model.executor().forward([TokenSequence.over([PlacedChunk(kv=kv, start=0)], position=3)], [[60]])


def test_text_never_becomes_a_control_token(opened, make_model):
    ours, theirs = opened().tokens, make_model("llama").tokens
    for text in ("The <eos> of a <bos>line<pad>", "\u00e4\u6f22 12 345\n\n x", "", "<eos>"):
        assert ours.encode(text) == theirs.encode(text)
        assert not ours.control_ids & {*ours.encode(text)}
        assert ours.encode(text, control=True) == theirs.encode(text, control=True)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))


@pytest.fixture(scope="module")
def hybrid(files, tmp_path_factory):
    """An index that searches by words and by vectors of a RoBERTa in sentence-transformers' layout."""
    folder = tmp_path_factory.mktemp("hybrid")
    embedder = shutil.copytree(embedder_path(), folder / "embedder", ignore=shutil.ignore_patterns("*.pt"))
    names = {"": "Transformer", "pooling": "Pooling"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{name}"} for path, name in names.items()]
    (embedder / "modules.json").write_text(json.dumps(modules))
    (embedder / "pooling").mkdir()
    (embedder / "pooling/config.json").write_text('{"pooling_mode": "mean"}')
    for name, text in DOCUMENTS.items():
        (folder / name).write_text(text)
    with RagKV.create(folder / "index", model=files(), chunk_tokens=40, embedder=str(embedder)) as rag:
        assert rag.config.retrieval == "hybrid"
        rag.ingest(*(folder / name for name in DOCUMENTS))
    return rag.folder


@pytest.mark.parametrize("name", ["full", "single", "block", "ape", "ippd"])
def test_a_greedy_answer_needs_no_torch(name, hybrid):
    """In a process of its own, with the answer and the scores of this one, which has torch."""
    with RagKV.open(hybrid) as rag:
        expected = rag.query("Who was the last keeper?", engine=name, max_new_tokens=6)
    program = (
        "import json, sys, ragkv; rag = ragkv.RagKV.open(sys.argv[1]); "
        f"answer = rag.query('Who was the last keeper?', engine={name!r}, max_new_tokens=6); rag.close(); "
        "print(json.dumps([answer.text, [source.score for source in answer.sources], 'torch' in sys.modules]))"
    )
    command = [sys.executable, "-c", program, str(hybrid)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    # those of this process may be from vectors in bfloat16
    scores = pytest.approx([source.score for source in expected.sources], abs=0.02)
    assert json.loads(ran.stdout) == [expected.text, scores, False]


def test_an_adapter_is_merged_into_a_file_of_the_cache(files, make_model, tmp_path, monkeypatch):
    """Its logits are those of the dense model with the adapter; a damaged file is made again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, generator = make_model("llama"), torch.Generator().manual_seed(0)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "bias": "none", "r": 4, "lora_alpha": 8}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    weights = {}
    for name, weight in model.module.named_parameters():
        if name.endswith("_proj.weight"):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            for part, shape in (("A", (4, weight.shape[1])), ("B", (weight.shape[0], 4))):
                weights[f"{module}.lora_{part}.weight"] = torch.randn(shape, generator=generator) * 0.1
    save_file(weights, adapter / "adapter_model.safetensors")
    dense = LanguageModel(copy.deepcopy(model.module), model.tokens._tokenizer, model.checkpoint)
    merge_adapter(dense.module, adapter)
    path, engine = files(), make_engine("block", {})
    (tmp_path / "ragkv/llama-cpp").mkdir(parents=True)
    (tmp_path / "ragkv/llama-cpp/of-another-adapter.gguf").touch()
    checkpoint = Checkpoint(name="tuned", location=str(path.parent), local=True, file=path.name, adapter=str(adapter))
    options = {"dtype": "auto", "device": "cpu", "codec": "half"}
    assert llama_cpp_executor.fingerprint(checkpoint, **options) != llama_cpp_executor.fingerprint(
        replace(checkpoint, adapter=None), **options
    )
    expected = forced(dense, engine, [50, 60], **PARTS)
    changed = divergence(expected, forced(model, engine, [50, 60], **PARTS)).max()
    assert changed > 0.1
    for damage in (False, True):
        if damage:
            [merged] = tmp_path.glob("ragkv/llama-cpp/*.gguf")
            content = bytearray(merged.read_bytes())
            content[-100] ^= 0xFF
            merged.write_bytes(content)
        scores = forced(llama_cpp_executor.load(checkpoint, **options), engine, [50, 60], **PARTS)
        assert divergence(expected, scores).max() < changed / 20


def test_models_doctor_and_plan_take_the_runtime_of_a_new_index(files, index):
    model = str(files("qwen3"))
    shown = model_requirements(model)
    assert (shown.runtime, shown.dtype, [*shown.kv_bytes]) == ("llama-cpp", "(guessed) all F32", ["half"])
    assert (shown.engines["block"], shown.engines["blend"] is None) == (None, False)
    for settings in ({"dtype": "float32"}, {"engines": ["blend"]}, {"encoding": 64}):
        assert not runs_by_llama_cpp(resolve(model), settings)
    assert ChunkReader(index, model, engines=["block"]).to_json()["dtype"] == "(guessed) all F32"
    assert [*_record_bytes(index, (50, 51, 52))] == ["half"]
