"""`RagKVConnector`: vLLM takes the KV of a prompt's chunks from an index instead of prefilling them (docs/vllm.md).

A connector promises KV for a run of tokens from the prompt's start, and vLLM does not check what fills it. So prefix
and chunks may come from the store, in any order, each key rotated to its place, as engine `block` reads them. Keys and
values are written by the attention backend's own `do_kv_cache_update`: layout, packing and dtype are vLLM's.

A request says in `kv_transfer_params["ragkv"]` which chunks its prompt consists of (`ChunkReads`). Their token ids are
those of its prompt, so a record that does not belong to these very tokens cannot be named. A request is served only if
its `cache_salt` is that of model, engine and index: vLLM keeps the KV in its prefix cache, where no other request may
meet it. What cannot be read is computed by vLLM.

Two kinds of request are prefilled by vLLM, and what it computes is noted: with `mode` "prove" it is compared with the
records, with "encode" it is handed out, for an ingest. Only who names the connector's `regime` is served, which the
answer to a proof tells; it holds as long as everything that changes vLLM's numbers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ragkv.config import load_config
from ragkv.errors import RagkvError, UnsupportedModelError
from ragkv.model.attention_hook import head_dim, rotary_of
from ragkv.model.checkpoint import resolve
from ragkv.model.loading import reach, refuse_by_name
from ragkv.runtime.vllm import PARAMS, ChunkReads, salt_of
from ragkv.store import KVIdentity, Store, codec_from_config
from ragkv.store.tier import SharedTiers

if TYPE_CHECKING:
    from ragkv.attention.kv import ChunkKV

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorWorkerMetadata,
    )
except ImportError:  # without vLLM the module can be imported, as `ragkv.integrations` says, and nothing is connected
    KVConnectorBase_V1 = KVConnectorMetadata = KVConnectorWorkerMetadata = KVConnectorHandshakeMetadata = object
    KVConnectorRole = None

logger = logging.getLogger(f"vllm.{__name__}")  # under vLLM's own logger, which prints it
LIMIT = 0.1, 2e-3
"""The largest ‖stored − computed‖ / ‖computed‖ that proves a model, and that of float32 throughout. Other keys give
about 1."""


@dataclass(slots=True, kw_only=True)
class BlockRange:
    """Where a request's KV lies: tokens `start:stop` of the prompt, and all of the request's blocks so far.

    `parts` are the records of the prompt's first tokens; `result` is the file, without the rank, for the KV of a
    request with `mode` "encode".
    """

    request: str
    parts: tuple[KVIdentity, ...]
    start: int = 0
    stop: int = 0
    blocks: list[int] = field(default_factory=list)
    result: Path | None = None

    @property
    def tokens(self) -> int:
        """Tokens of all parts."""
        return sum(part.tokens for part in self.parts)


@dataclass(slots=True)
class StepWork(KVConnectorMetadata):  # type: ignore[misc]
    """What the workers do in a step: read KV for `loads`, and note what vLLM computes for `notes`."""

    loads: list[BlockRange] = field(default_factory=list)
    notes: list[BlockRange] = field(default_factory=list)


@dataclass(slots=True)
class Reports(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Request -> why its records are refused, or its KV is not handed out; "" if all is well."""

    of: dict[str, str]

    def aggregate(self, other: Reports) -> Reports:
        """Those of two ranks: each must be content."""
        return Reports({name: self.of.get(name, "") or other.of.get(name, "") for name in {**self.of, **other.of}})


@dataclass(slots=True)
class WorkerBackend(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a worker tells the scheduler when vLLM starts."""

    attention: str


def head_slice(heads: int, rank: int, ranks: int) -> slice:
    """The key heads that a rank of `ranks` holds of `heads`; with fewer heads than ranks, several hold the same."""
    each = max(heads // ranks, 1)
    first = rank * each if heads >= ranks else rank * heads // ranks
    return slice(first, first + each)


def refuse_unproved(vllm_config: Any, kv_cache_config: Any) -> None:
    """UnsupportedModelError for what has not been tried: better no server than wrong answers."""
    parallel = vllm_config.parallel_config
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    cut = any(getattr(spec, name, None) for spec in specs for name in ("sliding_window", "attention_chunk_size"))
    ways = ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size")
    reasons = {
        "several kinds of KV cache (a hybrid model)": len(specs) != 1,
        "sliding windows or latent attention": cut or type(specs[0]).__name__ != "FullAttentionSpec",
        "an 8-bit KV cache": str(vllm_config.cache_config.cache_dtype).startswith(("fp8", "int8", "nvfp4")),
        "speculative decoding": vllm_config.speculative_config is not None,
        "pipeline or context parallelism": any(getattr(parallel, name, 1) != 1 for name in ways),
    }
    if why := [what for what, so in reasons.items() if so]:
        raise UnsupportedModelError(
            f"RagKVConnector does not serve {' or '.join(why)}: start vLLM without it, or with another model."
        )


class RecordReader:
    """Records of an index, or of the tiers that a `ragkv.toml` names. The index may be made, or replaced, later."""

    def __init__(self, place: str) -> None:
        path = Path(place).expanduser()
        self.folder = None if path.is_file() else path
        self._config_folder = path.parent if path.is_file() else path
        self._store: Store | None = None
        self._tiers: SharedTiers | None = None
        self._dtype: str | None = None
        if self.folder is None and not load_config(self._config_folder).tiers:
            raise UnsupportedModelError(f"{place} names no [[tiers]]: give RagKVConnector the folder of an index.")

    def open(self) -> str:
        """Open what is not open yet; returns the index's dtype. RagkvError if there is no index."""
        if self._store is not None and not self._store.in_place:  # deleted, and perhaps made again
            self.close()
        if self._dtype is None:
            config = load_config(self._config_folder)
            codec = codec_from_config({"id": config.codec})
            if self.folder is not None:
                self._store = Store.open(self.folder, readonly=True, codec=codec)
            self._tiers = SharedTiers(config.tiers, codec) if config.tiers else None
            self._dtype = config.dtype
        return self._dtype

    def may_have(self, identities: Sequence[KVIdentity]) -> bool:
        """Whether all of them are stored, or may lie in a tier."""
        try:
            self.open()
            if self._tiers is not None or self._store is None:
                return True
            return self._store.has_many(identities) == set(identities)
        except RagkvError as error:
            logger.warning("%s", error)
            return False

    def read(self, identities: Sequence[KVIdentity]) -> list[ChunkKV]:
        """RagkvError unless all can be read."""
        self.open()
        kvs = {} if self._store is None else self._store.get_many(identities)
        missing = [identity for identity in identities if identity not in kvs]
        if missing and self._tiers is not None:
            kvs |= {identity: kv for identity, (_, kv) in self._tiers.fetch(missing).items()}
        if missing := [identity for identity in identities if identity not in kvs]:
            raise RagkvError(f"{len(missing)} of {len(identities)} records cannot be read")
        return [kvs[identity] for identity in identities]

    def close(self) -> None:
        for each in (self._store, self._tiers):
            if each is not None:
                each.close()
        self._store = self._tiers = self._dtype = None


class Recorder:
    """What vLLM computes for the tokens of some requests, as it hands it to its own cache writer."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._taken: dict[str, dict[int, Tensor]] = {}
        self._impls: list[Any] = []

    def begin(self, notes: Sequence[BlockRange], layers: Mapping[int, Any]) -> None:
        """Note this step's keys and values."""
        for number, layer in layers.items():
            layer.impl.do_kv_cache_update = partial(self._update, layer.impl.do_kv_cache_update, notes, number)
            self._impls.append(layer.impl)

    def _update(self, write: Any, notes: Any, number: int, layer: Any, key: Any, value: Any, *where: Any) -> None:
        write(layer, key, value, *where)
        slots: Tensor = where[-1][: len(key)]
        for note in notes:
            mine = slots_of(note, self._block_size).to(slots.device)
            token, row = (mine[:, None] == slots[None]).nonzero(as_tuple=True)
            layers = self._taken.setdefault(note.request, {})
            if number not in layers:  # what is not computed stays NaN
                layers[number] = torch.full((2, note.tokens, *key.shape[1:]), torch.nan, dtype=key.dtype)
            for whole, new in zip(layers[number], (key, value), strict=True):
                whole[note.start + token.cpu()] = new[row].cpu()

    def end(self, notes: Sequence[BlockRange]) -> list[tuple[BlockRange, dict[int, Tensor]]]:
        """The requests whose last token is noted now, with keys and values `(2, tokens, heads, head_dim)` by layer."""
        while self._impls:
            del self._impls.pop().do_kv_cache_update  # the class's own again
        return [(note, self._taken.pop(note.request, {})) for note in notes if note.stop == note.tokens]


def slots_of(work: BlockRange, block_size: int) -> Tensor:
    """Where in vLLM's cache the tokens lie."""
    places = torch.arange(work.start, work.stop)
    return torch.tensor(work.blocks)[places // block_size] * block_size + places % block_size


class RagKVConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Made twice by vLLM: in the scheduler, which promises tokens, and in each worker, which writes them."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        refuse_unproved(vllm_config, kv_cache_config)
        transfer, self._model = vllm_config.kv_transfer_config, vllm_config.model_config
        transfer.kv_load_failure_policy = "recompute"  # the scheduler reads it after this
        self._vllm_config, parallel = vllm_config, vllm_config.parallel_config
        self._block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        place = transfer.kv_connector_extra_config.get("index")
        if not isinstance(place, str):
            raise UnsupportedModelError('RagKVConnector needs kv_connector_extra_config {"index": "FOLDER"}.')
        self._reader = RecordReader(place)
        config = self._model.hf_text_config
        refuse_by_name(self._model.model, config)
        if getattr(config, "no_rope_layers", None) or reach(config)[1]:
            raise UnsupportedModelError(
                f"RagKVConnector does not know how {self._model.model} rotates the keys of each layer."
            )
        self._rotary, self._kv_heads, self._head_dim = rotary_of(config), config.num_key_value_heads, head_dim(config)
        self._ranks = parallel.tensor_parallel_size
        self._rank = parallel.rank % self._ranks
        self._heads = head_slice(self._kv_heads, self._rank, self._ranks)
        # of the scheduler
        self._regime = ""
        self._step = StepWork()
        self._noting: dict[str, BlockRange] = {}
        self._reports: dict[str, str] = {}
        self._loaded: dict[str, int] = {}
        # of a worker
        self._recorder = Recorder(self._block_size)
        self._failed: set[int] = set()
        self._news: dict[str, str] = {}

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """The recorder is Python between the pieces of a graph."""
        return True

    # the scheduler

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, WorkerBackend]) -> None:
        """At the start: now everything that changes vLLM's numbers is known."""
        import vllm

        names, model = sorted({each.attention for each in metadata.values()}), self._model
        cache = self._vllm_config.cache_config.cache_dtype
        self._regime = f"vllm:{vllm.__version__}:{'+'.join(names)}:{model.quantization}:{model.dtype}:{cache}"

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        reads, parts = self._reads(request)
        if reads is None or reads.mode or not self._reader.may_have(parts):
            return 0, False
        return max(0, self._whole(reads, request) - num_computed_tokens), False

    def _whole(self, reads: ChunkReads, request: Any) -> int:
        """Tokens in whole blocks that may be loaded; the last token is computed, because its logits are wanted."""
        whole: int = min(reads.tokens, request.num_tokens - 1) // self._block_size * self._block_size
        return whole

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        reads, parts = self._reads(request)
        if reads is None:
            return
        work = BlockRange(request=request.request_id, parts=parts)
        if reads.mode:
            work.result = self._result(reads, request.cache_salt)
            self._noting[work.request] = work
        elif num_external_tokens:
            work.stop = self._loaded[work.request] = self._whole(reads, request)
            work.start, work.blocks = work.stop - num_external_tokens, list(blocks.get_block_ids()[0])
            self._step.loads.append(work)

    def build_connector_meta(self, scheduler_output: Any) -> StepWork:
        step, self._step = self._step, StepWork()
        cached = scheduler_output.scheduled_cached_reqs
        new = [(each.req_id, each.block_ids, each.num_computed_tokens) for each in scheduler_output.scheduled_new_reqs]
        old = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for name, blocks, computed in (*new, *old):
            if (note := self._noting.get(name)) is None:
                continue
            fresh = name not in cached.req_ids or name in cached.resumed_req_ids
            note.blocks = [*([] if fresh else note.blocks), *(blocks[0] if blocks else ())]
            stop = min(computed + scheduler_output.num_scheduled_tokens[name], note.tokens)
            if computed < stop:
                note.start, note.stop = computed, stop
                step.notes.append(deepcopy(note))
        return step

    def update_connector_output(self, connector_output: Any) -> None:
        if isinstance(connector_output.kv_connector_worker_meta, Reports):
            self._reports |= connector_output.kv_connector_worker_meta.of

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        name = request.request_id
        self._noting.pop(name, None)
        loaded, report = self._loaded.pop(name, 0), self._reports.pop(name, None)
        if PARAMS not in (request.kv_transfer_params or {}):
            return False, None
        dtype = str(self._model.dtype).removeprefix("torch.")
        facts = {"regime": self._regime, "dtype": dtype, "ranks": self._ranks}
        return False, {PARAMS: {**facts, "loaded": loaded, "report": report}}

    def _reads(self, request: Any) -> tuple[ChunkReads | None, tuple[KVIdentity, ...]]:
        """What a request may read, or wants to be noted: None unless it says so itself, and is salted for it."""
        params, prompt = (request.kv_transfer_params or {}).get(PARAMS), request.prompt_token_ids
        if not params or request.lora_request is not None or not prompt:
            return None, ()
        try:
            reads = ChunkReads.of(params)
            parts = _parts(reads, prompt)
        except (TypeError, ValueError, KeyError) as error:
            logger.warning("a request's kv_transfer_params[%r] are not read: %s", PARAMS, error)
            return None, ()
        if reads.mode == "encode":
            allowed = self._result(reads, request.cache_salt) is not None
        else:
            salted = reads.regime == self._regime and request.cache_salt == salt_of(reads)
            allowed = (salted or reads.mode == "prove") and self._serves(reads.model)
        return (reads, parts) if allowed and 0 < reads.tokens <= len(prompt) else (None, ())

    def _serves(self, fingerprint: str) -> bool:
        """Whether it is vLLM's model, as vLLM encodes it or as ragkv does."""
        try:
            dtype = self._reader.open()
        except RagkvError as error:
            logger.warning("%s", error)
            return False
        revision = getattr(self._model.hf_config, "_commit_hash", None)
        return fingerprint in _fingerprints(self._model.model, revision, self._regime, dtype)

    def _result(self, reads: ChunkReads, salt: Any) -> Path | None:
        """The file for KV that is handed out. Its folder is there already, with a name that only its maker knows."""
        if not (re.fullmatch(r"vllm-\w+", reads.index, re.ASCII) and re.fullmatch("[0-9a-f]{32}", str(salt))):
            return None
        folder = None if self._reader.folder is None else self._reader.folder / "derived" / reads.index
        return folder / str(salt) if reads.mode == "encode" and folder is not None and folder.is_dir() else None

    # a worker

    @property
    def _layers(self) -> dict[int, Any]:
        """vLLM's attention layers by number."""
        from vllm.model_executor.models.utils import extract_layer_index

        context = self._vllm_config.compilation_config.static_forward_context
        return {extract_layer_index(name): each for name, each in context.items() if hasattr(each, "impl")}

    def get_handshake_metadata(self) -> WorkerBackend:
        return WorkerBackend("+".join(sorted({each.attn_backend.get_name() for each in self._layers.values()})))

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        if connector_metadata.notes:
            self._recorder.begin(connector_metadata.notes, self._layers)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for load in self._get_connector_metadata().loads:
            try:
                self._load(load)
            except Exception as error:  # whatever it is, vLLM computes these blocks
                logger.warning("stored chunks of request %s are computed by vLLM: %s", load.request, error)
                self._failed.update(load.blocks[load.start // self._block_size : load.stop // self._block_size])

    def _load(self, load: BlockRange) -> None:
        layers = self._layers
        placed = self._placed(load.parts, len(layers))
        device = next(iter(layers.values())).kv_cache.device
        slots = slots_of(load, self._block_size).to(device)
        window = slice(load.start, load.stop)
        for number, layer in layers.items():
            kv = [self._rows(start, chunk, number, device) for start, chunk in placed]
            whole = (torch.cat(each, 1)[:, window] for each in zip(*kv, strict=True))
            rows = [each.to(self._model.dtype).transpose(0, 1).contiguous() for each in whole]
            layer.impl.do_kv_cache_update(layer, *rows, layer.kv_cache, slots)

    def _placed(self, parts: Sequence[KVIdentity], layers: int) -> list[tuple[int, ChunkKV]]:
        """Where each part starts, and its record; RagkvError for one that cannot be read or has another shape."""
        for part, kv in zip(parts, kvs := self._reader.read(parts), strict=True):
            shape = (self._kv_heads, part.tokens, self._head_dim)
            if kv.layers != layers or any(tuple(key.shape) != shape for key in (*kv.keys, *kv.values)):
                raise RagkvError(f"a record has not {layers} layers of keys and values {shape}")
        return list(zip(accumulate([kv.tokens for kv in kvs], initial=0), kvs, strict=False))

    def _rows(self, start: int, kv: ChunkKV, layer: int, device: str | torch.device = "cpu") -> tuple[Tensor, Tensor]:
        """This rank's keys, moved to `start`, and values of a layer, `(heads, tokens, head_dim)`."""
        keys, values = (each[layer][self._heads].to(device) for each in (kv.keys, kv.values))
        if move := start - kv.encoded_at:
            keys = self._rotary.rotate(keys[None], layer, torch.full((1, kv.tokens), move, device=device))[0]
        return keys, values

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All layers are written when `start_load_kv` returns."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """`Recorder` has what was computed before it is packed."""

    def wait_for_save(self) -> None:
        notes = self._get_connector_metadata().notes
        for note, noted in self._recorder.end(notes) if notes else ():
            try:
                layers = torch.stack([kv for _, kv in sorted(noted.items())]).transpose(2, 3)
                report = "" if bool(layers.isfinite().all()) else "vLLM did not compute all of the prompt"
                if note.result is None:
                    report = report or self._difference(note, layers)
                elif not report:  # this rank's heads
                    save_file({"kv": layers.contiguous()}, f"{note.result}-{self._rank}")
            except Exception as error:
                report = f"they cannot be read or written: {error}"
            self._news[note.request] = report
            if report:
                logger.error("RagKVConnector refuses a request: %s", report)

    def _difference(self, note: BlockRange, layers: Tensor) -> str:
        """Why records are not what vLLM computes; "" if they are.

        A part that was encoded after just the tokens before it must be equal in all layers. Of any other, the first
        layer must be, which depends on a token and its place alone: so moved keys are proved too.
        """
        before: tuple[int, ...] = ()
        for part, (start, kv) in zip(note.parts, self._placed(note.parts, len(layers)), strict=True):
            limit = LIMIT[{self._model.dtype, kv.dtype} == {torch.float32} and not kv.packed]
            for number, computed in enumerate(layers if part.prefix_ids == before else layers[:1]):
                pairs = zip(self._rows(start, kv, number), computed[:, :, start : start + kv.tokens], strict=True)
                for what, (mine, theirs) in zip(("keys", "values"), pairs, strict=True):
                    far = float((mine.float() - theirs.float()).norm() / theirs.float().norm())
                    if not far <= limit:
                        return f"{what} of layer {number} differ from vLLM's own prefill by {far:.2g} of their length"
            before += part.chunk_ids
        return ""

    def build_connector_worker_meta(self) -> Reports | None:
        news, self._news = self._news, {}
        return Reports(news) if news else None

    def shutdown(self) -> None:
        self._reader.close()


def _parts(reads: ChunkReads, prompt: Sequence[int]) -> tuple[KVIdentity, ...]:
    """The records of a prompt's first tokens; their ids are the prompt's own."""
    parts, start = list[KVIdentity](), 0
    for encoding, tokens, before in reads.chunks:
        ids = tuple(prompt[start : start + tokens])
        parts.append(KVIdentity(model=reads.model, encoding=encoding, prefix_ids=before, chunk_ids=ids))
        start += tokens
    return tuple(parts)


@cache
def _fingerprints(model: str, revision: str | None, regime: str, dtype: str) -> set[str]:
    """The fingerprints of vLLM's model: encoded by vLLM, and by ragkv on a processor or on this machine's device."""
    checkpoint = resolve(model)
    revision = None if checkpoint.local else revision
    own = {checkpoint.fingerprint(dtype, revision, device=device) for device in ("cpu", None)}
    return {checkpoint.fingerprint_of(regime, revision), *own}
