"""A causal language model as ragkv runs it.

Any supported checkpoint of transformers is loaded unchanged; only its attention function is ragkv's
(`ragkv.model.attention_hook`), and on a CPU its linear layers use faster kernels (`ragkv.model.linear`). The state of a
request is bound around its forward pass, so threads and engines share a model. `shallow_copy` gives a second model over
the same weights whose attention or windows can be changed without affecting the first.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property, lru_cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from ragkv.attention.batch import KVComplete, Step
from ragkv.attention.kv import ChunkKV, Place, PlacedChunk
from ragkv.attention.sequence import TokenSequence
from ragkv.errors import PromptTooLongError
from ragkv.model.attention_hook import (
    AttentionBackend,
    LatentAttention,
    LayerMask,
    adapt,
    attend_by_ragkv,
    attention_backend,
    latents_of,
    read_whole,
    rotaries_of,
    without_rotary,
)
from ragkv.model.checkpoint import Checkpoint
from ragkv.model.decoder import PlainDecoder
from ragkv.model.loading import reach, refuse_by_name
from ragkv.model.prompt import Tokens
from ragkv.types import Capability, KVShape
from ragkv.util import batches
from ragkv.util.plugins import kernel_module
from ragkv.util.processors import fit_threads

if TYPE_CHECKING:
    from transformers import DynamicCache

logger = logging.getLogger(__name__)

_SPANS = ("window", "attention_chunk", "index_topk")  # parts of attribute names that limit how many tokens are seen
_LAYER_COUNTS = frozenset({"max_window_layers"})  # the number of layers with a window, not its length

_TIME_STEPS = (1.0, math.inf), (0.0, 1e-3)  # trained time steps are between 0.001 and 0.1


def shallow_copy(model: nn.Module) -> Any:
    """A copy of `model` that shares all its parameters and buffers; switch its attention with
    `set_attn_implementation`.

    Modules and configurations are copied: a few milliseconds and little memory, for a model of any size.
    """
    tensors = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, tensors)


def set_windows(model: nn.Module, sizes: Mapping[int, int]) -> None:
    """Replace each window that `sizes` names wherever the model keeps it: in its configurations and its modules.

    Windows are found by attribute names with "window" or the like, so check the masks afterwards.
    """
    for holder, name, value in _spans(model):
        if value in sizes:
            setattr(holder, name, sizes[value])


def in_float32(model: nn.Module) -> Any:
    """A float32 copy of `model` that converts each layer's weights while it runs, so it needs little extra memory."""
    other = shallow_copy(model)
    inside: set[int] = set()
    for module in list(other.modules()):
        for layer in module if isinstance(module, nn.ModuleList) else ():
            if id(layer) not in inside:
                kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
                layer.register_forward_pre_hook(partial(_widen_layer, kept))
                layer.register_forward_hook(partial(_restore_layer, kept), always_call=True)
                inside |= {id(each) for each in layer.modules()}
        if id(module) not in inside:
            _widen(module)
    return other


def _widen(module: nn.Module) -> None:
    stored: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    for held in stored:
        for name, tensor in held.items():
            if tensor is not None and tensor.dtype in (torch.bfloat16, torch.float16):
                wide = tensor.detach().float()
                held[name] = nn.Parameter(wide, requires_grad=False) if held is module._parameters else wide


def _widen_layer(kept: list[Any], layer: nn.Module, _given: Any) -> None:
    if not kept:  # a layer that calls itself is converted already
        kept += [(held, dict(held)) for each in layer.modules() for held in (each._parameters, each._buffers)]
        for each in layer.modules():
            _widen(each)


def _restore_layer(kept: list[Any], _layer: nn.Module, _given: Any, _out: Any) -> None:
    for held, before in kept:
        held.update(before)
    kept.clear()


def bound_time_steps(model: nn.Module) -> bool:
    """Narrow the bounds of recurrent layers' time steps, if they have any, so that every token reaches them.

    Some families (Nemotron-H, Zamba 2) apply the bounds in a pass over several tokens but not to a single token, and in
    a trained model few tokens reach them. Returns whether there are bounds.
    """
    bounded = False
    for module in model.modules():
        least, most = getattr(module, "time_step_limit", None) or (0.0, math.inf)
        if least > 0 or most < math.inf:
            module.time_step_limit = _TIME_STEPS[0] if least > 0 else _TIME_STEPS[1]  # type: ignore[assignment]
            bounded = True
    return bounded


def spans(model: nn.Module) -> list[int]:
    """All numbers of tokens that limit what a token of `model` sees, found by attribute name."""
    return sorted({value for _, _, value in _spans(model)})


def _spans(model: nn.Module) -> Iterator[tuple[object, str, int]]:
    for holder in _holders(model):
        for name, value in list(vars(holder).items()):
            if any(word in name for word in _SPANS) and name not in _LAYER_COUNTS and type(value) is int:
                yield holder, name, value


def _holders(model: nn.Module) -> Iterator[object]:
    """The modules, and every configuration that is reachable from them, each once."""
    holders: set[int] = set()
    waiting: list[Any] = list(model.modules())
    while waiting:
        holder = waiting.pop()
        if id(holder) in holders:
            continue
        holders.add(id(holder))
        yield holder
        waiting += [value for value in vars(holder).values() if hasattr(value, "get_text_config")]


T = TypeVar("T")
Run = Callable[["LanguageModel", Step, Tensor, Tensor, Tensor], Tensor]
"""Computes a pass: (model, step, tokens, positions, kept) -> logits, as `LanguageModel.logits` does."""


ENCODE_TOKENS = 2048
"""Tokens of a step that encodes chunks; with more, activations no longer fit a CPU's caches."""
FEW = 256
"""Up to this many tokens only the matrix products of a pass take long; above, the rest is worth torch's threads."""


class LanguageModel:
    """A loaded model: it encodes chunks to KV and runs tokens against a context.

    Make one with `ragkv.model.self_check.load_model`, which checks it first.
    """

    joins: ClassVar[bool] = True
    """Whether the chunks that a sequence sees may be joined (`ragkv.attention.sequence`)."""
    kernels_alone: bool = False
    """Whether ragkv's own kernels do all the heavy work of a pass (`ragkv.model.linear.optimize_layers`)."""

    def __init__(self, model: Any, tokenizer: Any, checkpoint: Checkpoint) -> None:
        fit_threads()
        self._hold(model, tokenizer, checkpoint)
        refuse_by_name(checkpoint.name, self.config)
        if not isinstance(model, PlainDecoder):
            adapt(self._model)
            attend_by_ragkv(self._model)
        self._latents = latents_of(model)
        self.shared: Mapping[int, int] = {}
        """Layers that reuse another layer's keys and values (Gemma 3n) -> that layer; found by the self-check on load.
        """
        self.rotaries = rotaries_of(model, self.config)
        self.rotary = self.rotaries[0] if self.rotaries else without_rotary(self.layers)
        """How chunks are moved; chosen by the self-check on load."""

    def _hold(self, model: Any, tokenizer: Any, checkpoint: Checkpoint) -> None:
        """Set the attributes that all kinds of model share."""
        self.checkpoint = checkpoint
        self.tokens = Tokens(tokenizer)
        self.config = model.config.get_text_config(decoder=True)
        self._model = model.eval()
        read_whole(model, checkpoint.name)
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.parameters: int = sum(p.numel() for p in model.parameters())
        self.int8 = False
        """Whether its linear layers have int8 weights (`ragkv.model.linear`)."""
        self.layers: int = self.config.num_hidden_layers
        self.missing_capabilities: Mapping[Capability, str] = {}
        """Capabilities of engines that this model lacks, with the reason; found by the self-check on load."""
        self.moves_within: int | None = None
        """Chunks may be moved only in prompts of up to this many positions; None: no limit."""
        generation = getattr(model, "generation_config", None)
        self.eos_ids = eos_ids(getattr(generation, "eos_token_id", None), tokenizer.eos_token_id)
        self.max_positions, self._reach = reach(self.config)
        holders = (self.config, *model.modules())
        self._companions: dict[Any, Any] = {}
        self._lock, self._whole_lock = threading.Lock(), threading.RLock()
        self.load_whole: Callable[[], Any] | None = None
        """Loads transformers' own model, as passes need it; None if passes run on it already."""
        self.optimize: Callable[[LanguageModel], None] = lambda _: None
        """What was done to its layers after the check."""
        self.windows = sorted({w for h in holders if isinstance(w := getattr(h, "sliding_window", None), int)})

    def companion(self, kind: Callable[[LanguageModel], T], make: Callable[[LanguageModel], T] | None = None) -> T:
        """The one `kind` that lives as long as this model; the first call makes it, by `make(self)` or `kind(self)`."""
        with self._lock:
            if kind not in self._companions:
                self._companions[kind] = (make or kind)(self)
            found: T = self._companions[kind]
            return found

    @property
    def revision(self) -> str | None:
        """The hub commit that was loaded; None for a folder."""
        found: str | None = getattr(self._model.config, "_commit_hash", None)
        return found

    def require_positions(self, last: int) -> None:
        """Refuse a prompt that is longer than the model's position range: PromptTooLongError."""
        if self.max_positions is not None and last > self.max_positions:
            raise PromptTooLongError(
                f"The prompt needs {last} positions but model {self.checkpoint.name!r} has {self.max_positions}"
                f"{self._reach}; lower --top-k or ask a shorter question."
            )

    @property
    def module(self) -> Any:
        """transformers' own model, for fine-tuning; after training, this object uses the trained weights.

        If passes run on a `PlainDecoder` so far, it is loaded, and passes run on it from now on.
        """
        with self._whole_lock:
            if (load := self.load_whole) is not None:
                self.load_whole = None
                self._model = load()
                self.config = self._model.config.get_text_config(decoder=True)
                self.optimize(self)
        return self._model

    @property
    def network(self) -> Any:
        """The module that passes run on: transformers' own, or a `PlainDecoder` with the same weights."""
        return self._model

    @property
    def precision(self) -> str:
        """The precision that it computes in: the name of its dtype, or "int8" for int8 weights."""
        return "int8" if self.int8 else str(self.dtype).removeprefix("torch.")

    @property
    def weight_bytes(self) -> int:
        return sum(weight.numel() * weight.element_size() for weight in self.network.parameters())

    @cached_property
    def kv_shape(self) -> KVShape:
        """The shape of its KV, from the KV of one token."""
        return self._sample.shape

    @cached_property
    def place(self) -> Place:
        """The device of its KV; if the model is split, the device of each layer."""
        if {parameter.device for parameter in self._model.parameters()} == {self.device}:
            return self.device
        devices = tuple(key.device for key in self._sample.keys)
        return devices[0] if len(set(devices)) == 1 else devices

    @cached_property
    def _sample(self) -> ChunkKV:
        [made] = self.encode([(0,)])
        return made

    @torch.inference_mode()
    def step(
        self,
        sequences: Sequence[TokenSequence],
        ids: Sequence[Sequence[int]],
        *,
        every: bool = False,
        seen: list[LayerMask] | None = None,
        run: Run | None = None,
    ) -> Tensor:
        """One forward pass: append `ids[i]` to `sequences[i]`; they may differ in length, position and context.

        Returns fp32 logits: `(sequences, vocab)` of each sequence's last token, or `(tokens, vocab)` of `every` token,
        in order. If no logits are wanted, the pass ends with the last keys and values. Sequences that only run `until`
        a layer form a pass of their own. Nothing is appended if it raises. `seen` is for the self-check. `run` computes
        an ordinary pass's logits.
        """
        logits, steps = torch.empty((0, 0)), []
        one_pass = partial(self._pass, every=every, seen=seen, run=run)
        few = self.kernels_alone and sum(map(len, ids)) <= FEW
        module = kernel_module("ragkv.util.kernels") if few else None
        with nullcontext() if module is None else module.instead_of_torch():
            for until in sorted(
                {sequence.until for sequence in sequences}, key=lambda layer: -1 if layer is None else layer
            ):
                some = [at for at, sequence in enumerate(sequences) if sequence.until == until]
                scores, step = one_pass([sequences[at] for at in some], [ids[at] for at in some], until)
                steps.append(step)
                logits = scores if until is None else logits
        for step in steps:
            step.commit()
        return logits

    def _pass(
        self,
        sequences: Sequence[TokenSequence],
        ids: Sequence[Sequence[int]],
        until: int | None,
        *,
        every: bool,
        seen: list[LayerMask] | None,
        run: Run | None,
    ) -> tuple[Tensor, Step]:
        """`step` of sequences that all run `until` the same layer, and the `Step` to commit."""
        wanted = until is None and (
            every or any(sequence.kept(len(new)) for sequence, new in zip(sequences, ids, strict=True))
        )
        last = None if wanted else self.last_own if until is None else until
        counts = [len(new) for new in ids]
        step = Step(sequences, counts, self.rotary, self.device, last=last, shared=self.shared)
        flat = [i for new in ids for i in new]
        kept = range(len(flat)) if every else step.kept
        tokens, positions, keep = self._uploaded(flat, step.positions, kept)
        if run is not None and last is None and seen is None:
            return run(self, step, tokens, positions, keep), step
        return self.logits(step, {"input_ids": tokens[None]}, positions, keep, seen), step

    def repeatable(
        self, sequences: Sequence[TokenSequence], ids: Sequence[Sequence[int]], run: Run
    ) -> tuple[Tensor, Tensor, Callable[[], Tensor] | None]:
        """`step` with one token per sequence: its logits, computed by `run`, and a function for the following steps.

        To use that function, write the next ids into the returned `(sequences,)` int64 and call it: it returns their
        logits from the same kernels on the same memory, without synchronising with the host, and does not advance
        `sequences`. It is None if the step cannot be repeated.
        """
        step = Step(sequences, [1] * len(sequences), self.rotary, self.device, shared=self.shared, fixed=True)
        tokens, positions, keep = self._uploaded([i for each in ids for i in each], step.positions, step.kept)

        def again() -> Tensor:
            positions.add_(1)
            step.advance()
            return self.logits(step, {"input_ids": tokens[None]}, positions, keep)

        logits = run(self, step, tokens, positions, keep)
        step.commit()
        return logits, tokens, again if step.repeats and not self._latents else None

    def _uploaded(self, *numbers: Sequence[int]) -> tuple[Tensor, ...]:
        """These numbers on the device, in one asynchronous transfer."""
        result = torch.tensor([i for each in numbers for i in each]).to(self.device, non_blocking=True)
        return torch.split(result, [len(each) for each in numbers])

    def logits(
        self,
        by: AttentionBackend,
        inputs: Mapping[str, Tensor],
        positions: Tensor,
        keep: Tensor,
        seen: list[LayerMask] | None = None,
    ) -> Tensor:
        """The fp32 logits of the tokens `keep` of a pass that attends `by` a step; the step is not committed."""
        logits = torch.empty((0, 0))
        model = self._model
        cache = None if isinstance(model, PlainDecoder) else _packed_cache()()
        by = LatentAttention(by, self._latents, cache) if self._latents else by
        with suppress(KVComplete), attention_backend(by, seen=seen):
            logits = (
                model(
                    **inputs,
                    position_ids=positions[None],
                    past_key_values=cache,
                    use_cache=False,
                    logits_to_keep=keep,
                )
                .logits[0]
                .float()
            )
        return logits[keep] if len(logits) > len(keep) else logits  # Whisper returns the logits of every token

    @property
    def last_own(self) -> int:
        """The last layer that has keys and values of its own."""
        return max(layer for layer in range(self.layers) if layer not in self.shared)

    @torch.inference_mode()
    def through(self, ids: Sequence[int], position: int, by: AttentionBackend) -> None:
        """Run a sequence from `position` on for its keys and values only: `by` receives them, and may end the pass."""
        tokens, positions = self._uploaded(ids, range(position, position + len(ids)))
        self.logits(by, {"input_ids": tokens[None]}, positions, positions[:0])

    def encode(self, chunks: Sequence[Sequence[int]], *, prefix: ChunkKV | None = None) -> list[ChunkKV]:
        """Prefill chunks to KV, each alone, or after `prefix` (placed from 0): the two encodings.

        Chunks of any length share a step of at most `ENCODE_TOKENS` tokens (or one chunk).
        """
        return list(self.encode_each(chunks, prefix=prefix))

    def encode_each(self, chunks: Sequence[Sequence[int]], *, prefix: ChunkKV | None = None) -> Iterator[ChunkKV]:
        """As `encode`, one at a time and in the order given."""
        if any(not ids for ids in chunks):
            raise ValueError("a chunk without tokens has no KV")
        start = 0 if prefix is None else prefix.tokens
        seen = () if prefix is None else (PlacedChunk(kv=prefix, start=0),)
        for batch in batches(chunks, len, ENCODE_TOKENS):
            sequences = [TokenSequence.for_kv(seen, position=start) for _ in batch]
            self.step(sequences, batch)
            for sequence in sequences:
                yield sequence.cache.chunk_kv(encoded_at=start)

    def cache(self, kv: ChunkKV | None) -> DynamicCache:
        """A plain cache of transformers that holds `kv`, as the model's own code would have filled it."""
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer, (key, value) in enumerate(zip(kv.keys, kv.values, strict=True) if kv is not None else ()):
            if not key.shape[0]:  # the layer reads another layer's keys
                continue
            if not value.shape[-1]:  # a latent and its rope key, which transformers keeps apart
                key, value = torch.tensor_split(key, [self.config.kv_lora_rank], dim=-1)
            cache.update(key[None], value[None], layer)
        return cache

    @contextmanager
    def plain(self, implementation: str = "sdpa") -> Iterator[Any]:
        """transformers' own model and attention over the same weights, for the self-check and for baselines."""
        capped = getattr(self.config, "attn_logit_softcapping", None) is not None
        eager = capped or (implementation == "sdpa" and not getattr(self.module, "_supports_sdpa", False))
        with torch.inference_mode():
            yield self.with_attention("eager" if eager else implementation)

    @torch.inference_mode()
    def whole(self, ids: Tensor, positions: Tensor, by: AttentionBackend) -> Tensor:
        """fp32 logits `(rows, n, vocab)` of whole sequences `(rows, n)` attended `by` a reference, without a cache."""
        with attention_backend(by):
            logits: Tensor = self._model(
                input_ids=ids,
                position_ids=positions,
                past_key_values=_packed_cache()(),
                use_cache=False,
                logits_to_keep=torch.arange(ids.shape[1]).to(ids.device),  # given a number, Gemma 4 slices its masks
            ).logits.float()
        return logits

    def with_attention(self, name: str) -> Any:
        """transformers' model over the same weights, attending by the registered function `name`."""
        other = shallow_copy(self.module)
        other.set_attn_implementation(name)
        return other

    def with_windows(self, sizes: Mapping[int, int]) -> LanguageModel:
        """This model with other sliding windows, old size to new, over the same weights: for the self-check."""
        other = copy.copy(self)
        other._companions = {}  # companions belong to the original model
        other._model = shallow_copy(self._model)
        set_windows(other._model, sizes)
        return other


@lru_cache(maxsize=1)
def _packed_cache() -> type[Any]:
    from transformers import DynamicCache

    class PackedCache(DynamicCache):  # type: ignore[misc]
        """An empty cache: sequences keep their own KV.

        Without a cache, transformers would treat restarting positions as a packed training sample: it would synchronise
        with the device to check, and mask accordingly.
        """

        def __init__(self) -> None:
            super().__init__()
            self.given: tuple[int, Tensor, Tensor] | None = None
            """The last update: the layer, and the keys and values of its new tokens."""

        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
        ) -> tuple[Tensor, Tensor]:
            self.given = (layer_idx, key_states, value_states)
            return key_states, value_states

    return PackedCache


def eos_ids(*found: int | list[int] | None) -> frozenset[int]:
    """All end tokens that configurations name."""
    ids: set[int] = set()
    for eos in found:
        ids |= set(eos) if isinstance(eos, list) else set() if eos is None else {eos}
    return frozenset(ids)
