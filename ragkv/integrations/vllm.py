"""`RagKVConnector`: vLLM takes the KV of a prompt's chunks from an index instead of prefilling them (docs/vllm.md).

A connector promises KV for a run of tokens from the prompt's start, and vLLM does not check what fills it. So prefix
and chunks may come from the store, in any order, each key rotated to its place, as engine `block` reads them. Keys and
values are written by the attention backend's own `do_kv_cache_update`: layout, packing and dtype are vLLM's.

A request says in `kv_transfer_params["ragkv"]` which chunks its prompt consists of (`ChunkReads`). Their token ids are
those of its prompt, so a record that does not belong to these very tokens cannot be named. A request is served only if
its `cache_salt` is that of model, engine and index: vLLM keeps the KV in its prefix cache, where no other request may
meet it. What cannot be read is computed by vLLM.

Nothing is served before a request with `mode` "prove" was compared with vLLM's own prefill.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
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
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorWorkerMetadata,
    )
except ImportError:  # without vLLM the module can be imported, as `ragkv.integrations` says, and nothing is connected
    KVConnectorBase_V1 = KVConnectorMetadata = KVConnectorWorkerMetadata = object
    KVConnectorRole = None

logger = logging.getLogger(f"vllm.{__name__}")  # under vLLM's own logger, which prints it
LIMIT = 0.1, 2e-3
"""The largest ‖stored − computed‖ / ‖computed‖ that proves a model, and that of float32 throughout. Other keys give
about 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A chunk of a prompt: its record, and where its first token stands."""

    identity: KVIdentity
    start: int


@dataclass(slots=True, kw_only=True)
class BlockRange:
    """Where a request's KV goes: tokens `start:stop` of the prompt, and all of the request's blocks so far."""

    request: str
    parts: tuple[Part, ...]
    start: int
    stop: int
    blocks: list[int]

    @property
    def tokens(self) -> int:
        """Tokens of all parts."""
        return self.parts[-1].start + self.parts[-1].identity.tokens


@dataclass(slots=True)
class StepWork(KVConnectorMetadata):  # type: ignore[misc]
    """What the workers do in a step: read KV for `loads`, and note what vLLM computes for `notes`."""

    loads: list[BlockRange] = field(default_factory=list)
    notes: list[BlockRange] = field(default_factory=list)


@dataclass(slots=True)
class Verdicts(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Model's fingerprint -> why its stored KV is refused; "" if it is proved."""

    of: dict[str, str]

    def aggregate(self, other: Verdicts) -> Verdicts:
        """Those of two ranks: each must be content."""
        return Verdicts({model: self.of.get(model, "") or other.of.get(model, "") for model in {**self.of, **other.of}})


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
    """Records of an index, or of the tiers that a `ragkv.toml` names. Never raises for what cannot be read."""

    def __init__(self, place: str) -> None:
        folder = Path(place).expanduser()
        self.config = load_config(folder.parent if folder.is_file() else folder)
        codec = codec_from_config({"id": self.config.codec})
        self._store = None if folder.is_file() else Store.open(folder, readonly=True, codec=codec)
        self._tiers = SharedTiers(self.config.tiers, codec) if self.config.tiers else None
        if self._store is None and self._tiers is None:
            raise UnsupportedModelError(f"{place} names no [[tiers]]: give RagKVConnector the folder of an index.")

    def may_have(self, identities: Sequence[KVIdentity]) -> bool:
        """Whether all of them are stored, or may lie in a tier."""
        if self._tiers is not None or self._store is None:
            return True
        try:
            return self._store.has_many(identities) == set(identities)
        except RagkvError as error:
            logger.warning("%s", error)
            return False

    def read(self, identities: Sequence[KVIdentity]) -> dict[KVIdentity, ChunkKV]:
        kvs = {} if self._store is None else self._store.get_many(identities)
        missing = [identity for identity in identities if identity not in kvs]
        if missing and self._tiers is not None:
            kvs |= {identity: kv for identity, (_, kv) in self._tiers.fetch(missing).items()}
        return kvs

    def close(self) -> None:
        for each in (self._store, self._tiers):
            if each is not None:
                each.close()


class Recorder:
    """What vLLM computes for the tokens of some requests, as it hands it to its own cache writer."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._taken: dict[str, dict[int, list[Tensor]]] = {}
        self._impls: list[Any] = []

    def begin(self, notes: Sequence[BlockRange], layers: Mapping[int, Any]) -> None:
        """Note this step's keys and values."""
        for number, layer in layers.items():
            layer.impl.do_kv_cache_update = partial(self._update, layer.impl.do_kv_cache_update, notes, number)
            self._impls.append(layer.impl)

    def _update(
        self,
        write: Callable[..., None],
        notes: Sequence[BlockRange],
        number: int,
        layer: Any,
        key: Tensor,
        value: Tensor,
        cache: Any,
        slots: Tensor,
    ) -> None:
        write(layer, key, value, cache, slots)
        for note in notes:
            rows = (
                (slots[None, : len(key)] == slots_of(note, self._block_size).to(slots.device)[:, None]).int().argmax(1)
            )
            whole = self._taken.setdefault(note.request, {}).setdefault(
                number, [torch.zeros((note.tokens, *t.shape[1:]), dtype=t.dtype) for t in (key, value)]
            )
            for kept, new in zip(whole, (key, value), strict=True):
                kept[note.start : note.stop] = new[rows].cpu()

    def end(self, notes: Sequence[BlockRange]) -> list[tuple[BlockRange, dict[int, list[Tensor]]]]:
        """The requests of which all tokens are noted now: layer -> keys and values `(tokens, heads, dim)`."""
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
        transfer, model = vllm_config.kv_transfer_config, vllm_config.model_config
        transfer.kv_load_failure_policy = "recompute"  # the scheduler reads it after this
        self._vllm_config = vllm_config
        self._block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        place = transfer.kv_connector_extra_config.get("index")
        if not isinstance(place, str):
            raise UnsupportedModelError('RagKVConnector needs kv_connector_extra_config {"index": "FOLDER"}.')
        self._reader = RecordReader(place)
        self._config = model.hf_text_config
        refuse_by_name(model.model, self._config)
        if getattr(self._config, "no_rope_layers", None) or reach(self._config)[1]:
            raise UnsupportedModelError(
                f"RagKVConnector does not know how {model.model} rotates the keys of each layer."
            )
        self._rotary = rotary_of(self._config)
        # of the scheduler
        self._served = _fingerprints(model, self._reader.config.dtype) if role == KVConnectorRole.SCHEDULER else set()
        self._step = StepWork()
        self._noting: dict[str, BlockRange] = {}
        self._verdicts: dict[str, str] = {}
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

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        reads = self._reads(request)
        if reads is None or reads.mode or self._verdicts.get(reads.model) != "":
            return 0, False
        if not self._reader.may_have([part.identity for part in parts_of(reads, request.prompt_token_ids)]):
            return 0, False
        whole = min(reads.tokens, request.num_tokens - 1) // self._block_size * self._block_size
        return max(0, whole - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        reads = self._reads(request)
        if reads is None:
            return
        name, parts = request.request_id, parts_of(reads, request.prompt_token_ids)
        if reads.mode:
            self._noting[name] = BlockRange(request=name, parts=parts, start=0, stop=0, blocks=[])
        elif num_external_tokens:
            stop = min(reads.tokens, request.num_tokens - 1) // self._block_size * self._block_size
            work = BlockRange(
                request=name,
                parts=parts,
                start=stop - num_external_tokens,
                stop=stop,
                blocks=list(blocks.get_block_ids()[0]),
            )
            self._step.loads.append(work)
            self._loaded[name] = stop

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
        if isinstance(connector_output.kv_connector_worker_meta, Verdicts):
            self._verdicts |= connector_output.kv_connector_worker_meta.of

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._noting.pop(request.request_id, None)
        loaded, reads = self._loaded.pop(request.request_id, 0), self._reads(request)
        if reads is None:
            return False, None
        return False, {PARAMS: {"loaded": loaded, "verdict": self._verdicts.get(reads.model)}}

    def _reads(self, request: Any) -> ChunkReads | None:
        """What a request may read: None unless it says so itself, and is salted for it."""
        params = (request.kv_transfer_params or {}).get(PARAMS)
        if params is None or request.lora_request is not None or not request.prompt_token_ids:
            return None
        try:
            reads = ChunkReads.of(params)
        except (TypeError, ValueError, KeyError) as error:
            logger.warning("a request's kv_transfer_params[%r] are not read: %s", PARAMS, error)
            return None
        if reads.model not in self._served or not 0 < reads.tokens <= len(request.prompt_token_ids):
            return None
        return reads if reads.mode or request.cache_salt == salt_of(reads) else None

    # a worker

    @property
    def _layers(self) -> dict[int, Any]:
        """vLLM's attention layers by number."""
        from vllm.model_executor.models.utils import extract_layer_index

        context = self._vllm_config.compilation_config.static_forward_context
        return {extract_layer_index(name): each for name, each in context.items() if hasattr(each, "impl")}

    @property
    def _heads(self) -> slice:
        parallel = self._vllm_config.parallel_config
        ranks = parallel.tensor_parallel_size
        return head_slice(self._config.num_key_value_heads, parallel.rank % ranks, ranks)

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
        layers, kvs = self._layers, self._reader.read([part.identity for part in load.parts])
        if missing := [part for part in load.parts if part.identity not in kvs]:
            raise RagkvError(f"{len(missing)} of {len(load.parts)} records cannot be read")
        placed = [(part, kvs[part.identity]) for part in load.parts]
        for _, kv in placed:
            self._require_shape(kv, len(layers))
        device = next(iter(layers.values())).kv_cache.device
        slots = slots_of(load, self._block_size).to(device)
        moves = torch.cat([torch.full((kv.tokens,), part.start - kv.encoded_at) for part, kv in placed])
        window, dtype = slice(load.start, load.stop), self._vllm_config.model_config.dtype
        for number, layer in layers.items():
            key, value = (
                torch.cat([of[number][self._heads] for of in tensors], 1)[:, window]
                for tensors in ([kv.keys for _, kv in placed], [kv.values for _, kv in placed])
            )
            key = self._moved(key.to(device), number, moves[window].to(device))
            rows = [rows.to(device, dtype).transpose(0, 1).contiguous() for rows in (key, value)]
            layer.impl.do_kv_cache_update(layer, *rows, layer.kv_cache, slots)

    def _moved(self, keys: Tensor, layer: int, moves: Tensor) -> Tensor:
        return self._rotary.rotate(keys[None], layer, moves[None])[0] if bool(moves.any()) else keys

    def _require_shape(self, kv: ChunkKV, layers: int) -> None:
        wanted = (self._config.num_key_value_heads, kv.tokens, head_dim(self._config))
        if kv.layers != layers or any(tuple(key.shape) != wanted for key in (*kv.keys, *kv.values)):
            raise RagkvError(f"a record has not {layers} layers of keys and values {wanted}")

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All layers are written when `start_load_kv` returns."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """`Recorder` has what was computed before it is packed."""

    def wait_for_save(self) -> None:
        notes = self._get_connector_metadata().notes
        for note, layers in self._recorder.end(notes) if notes else ():
            model = note.parts[0].identity.model
            try:
                self._news[model] = self._difference(note.parts, layers)
            except Exception as error:
                self._news[model] = f"they cannot be compared: {error}"
            if self._news[model]:
                logger.error("RagKVConnector refuses the stored chunks: %s", self._news[model])

    def _difference(self, parts: Sequence[Part], layers: Mapping[int, Sequence[Tensor]]) -> str:
        """Why records are not what vLLM computes; "" if they are.

        A part that was encoded after just the tokens before it must be equal in all layers. Of any other, the keys of
        the first layer must be, because they depend on a token and its place alone: so moved keys are proved too.
        """
        kvs = self._reader.read([part.identity for part in parts])
        if any(part.identity not in kvs for part in parts):
            return "a record cannot be read"
        before: tuple[int, ...] = ()
        exact = self._vllm_config.model_config.dtype == torch.float32
        for part in parts:
            kv, identity = kvs[part.identity], part.identity
            self._require_shape(kv, len(layers))
            same = identity.prefix_ids == before
            fine = exact and kv.dtype == torch.float32 and not kv.packed
            for number in sorted(layers) if same else [min(layers)]:
                for what, stored, computed in zip(
                    ("keys", "values"), (kv.keys[number], kv.values[number]), layers[number], strict=True
                ):
                    mine = stored[self._heads]
                    if what == "keys":
                        mine = self._moved(mine, number, torch.full((kv.tokens,), part.start - kv.encoded_at))
                    theirs = computed[part.start : part.start + kv.tokens].transpose(0, 1).float()
                    far = float((mine.float() - theirs).norm() / theirs.norm())
                    if not far <= LIMIT[fine]:
                        return f"{what} of layer {number} differ from vLLM's own prefill by {far:.2g} of their length"
            before += identity.chunk_ids
        return ""

    def build_connector_worker_meta(self) -> Verdicts | None:
        news, self._news = self._news, {}
        return Verdicts(news) if news else None

    def shutdown(self) -> None:
        self._reader.close()


def parts_of(reads: ChunkReads, prompt: Sequence[int]) -> tuple[Part, ...]:
    """The records of a prompt's first tokens; their ids are the prompt's own."""
    parts, start = list[Part](), 0
    for encoding, tokens, before in reads.chunks:
        ids = tuple(prompt[start : start + tokens])
        identity = KVIdentity(model=reads.model, encoding=encoding, prefix_ids=before, chunk_ids=ids)
        parts.append(Part(identity=identity, start=start))
        start += tokens
    return tuple(parts)


def _fingerprints(model: Any, dtype: str) -> set[str]:
    """The fingerprints that the index may have given vLLM's model, on a processor or on this machine's device."""
    checkpoint = resolve(model.model)
    revision = None if checkpoint.local else getattr(model.hf_config, "_commit_hash", None)
    return {checkpoint.fingerprint(dtype, revision, device=device) for device in ("cpu", None)}
