"""A causal language model as ragkv runs it: the one file that touches transformers' internals.

Any supported checkpoint of transformers is loaded unchanged; only its attention function is ragkv's
(`ragkv.model.interface`). What a request needs is bound around its forward pass, so that threads and engines share a
model freely.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache

from ragkv.attention.across import Ranks
from ragkv.attention.kv import ChunkKV, Place, Segment
from ragkv.attention.row import Row
from ragkv.attention.shape import KVShape
from ragkv.attention.step import KVComplete, Step
from ragkv.errors import PromptTooLongError
from ragkv.model.checkpoint import Checkpoint, require_on_hub, resolve
from ragkv.model.device import pick_device, pick_devices
from ragkv.model.families import adapt
from ragkv.model.families.latent import Absorbing, latents_of
from ragkv.model.interface import NAME, Attending, Seen, attending
from ragkv.model.loading import explained, open_checkpoint, quiet_loading
from ragkv.model.prompt import Tokens
from ragkv.model.refusal import reach, refuse_by_name
from ragkv.model.rotary import rotaries_of, without_rotary
from ragkv.model.twin import set_windows, twin
from ragkv.types import Need

__all__ = ["LanguageModel", "pick_device", "quiet_loading"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class LanguageModel:
    """A loaded model: encodes chunks to KV and runs tokens against a context.

    Build one with `LanguageModel.load`, which also makes the model prove itself.
    """

    joins: ClassVar[bool] = True
    """Whether the KV that a row sees may be laid out anew, side by side (`ragkv.attention.join`)."""

    def __init__(self, model: Any, tokenizer: Any, checkpoint: Checkpoint) -> None:
        self._hold(model, tokenizer, checkpoint)
        refuse_by_name(checkpoint.name, self.config)
        adapt(self._model)
        self._model.set_attn_implementation(NAME)
        self._latents = latents_of(model)
        self.shared: Mapping[int, int] = {}
        """Layers that read another's keys and values (Gemma 3n): that one's number; the proof on load finds them."""
        self.rotaries = rotaries_of(model, self.config)
        self.rotary = self.rotaries[0] if self.rotaries else without_rotary(self.layers)
        """How its chunks are moved; the proof on load settles it."""

    def _hold(self, model: Any, tokenizer: Any, checkpoint: Checkpoint) -> None:
        """What is known of any model, however it is run."""
        self.checkpoint = checkpoint
        self.tokens = Tokens(tokenizer)
        self.config = model.config.get_text_config(decoder=True)
        self._model = model.eval()
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.layers: int = self.config.num_hidden_layers
        self.lacks: Mapping[Need, str] = {}
        """What the engines may need that this model does not bear, and why: the proof on load finds it out."""
        self.moves_within: int | None = None
        """Chunks may be moved in prompts of at most so many positions; None: of any number."""
        generation = getattr(model, "generation_config", None)
        self.eos_ids = _eos_ids(getattr(generation, "eos_token_id", None), tokenizer.eos_token_id)
        self.max_positions, self._reach = reach(self.config)
        holders = (self.config, *model.modules())
        self._companions: dict[Any, Any] = {}
        self._lock = threading.Lock()
        self.windows = sorted({w for h in holders if isinstance(w := getattr(h, "sliding_window", None), int)})

    @classmethod
    def load(
        cls, name: str, *, dtype: str = "auto", device: str | None = None, revision: str | None = None
    ) -> LanguageModel:
        """Load "mini", a folder or a hub id; refuses what ragkv cannot run exactly.

        `dtype` "auto" is the checkpoint's own. Raises ModelLoadError or UnsupportedModelError.
        """
        from ragkv.model.proven import proven

        checkpoint = resolve(name)
        if not checkpoint.local:
            require_on_hub(name, revision=revision)
        devices = pick_devices(device, checkpoint.weight_bytes)
        model, tokenizer = open_checkpoint(checkpoint, dtype=dtype, devices=devices, revision=revision)
        with explained("Model", name), quiet_loading(reports=False):
            return proven(model, tokenizer, checkpoint)

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
        """transformers' own model, for fine-tuning: what is trained in it is what this object answers with."""
        return self._model

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self._model.parameters())

    @cached_property
    def kv_shape(self) -> KVShape:
        """The shape of its KV, as it makes it of one token."""
        return self._sample.shape

    @cached_property
    def place(self) -> Place:
        """Where its KV lies: on its device, or, if it is split, on each layer's own."""
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
        rows: Sequence[Row],
        ids: Sequence[Sequence[int]],
        *,
        every: bool = False,
        seen: list[Seen] | None = None,
        ranks: Ranks | None = None,
    ) -> Tensor:
        """One forward pass: `ids[i]` are appended to `rows[i]`, which may differ in length, place and context.

        Returns fp32 logits `(rows, vocab)` of each row's last token (of a `Stack`, of the tokens that it wants), or
        `(tokens, vocab)` of `every` token, in order.
        Where nobody wants logits, what follows the last keys and values is left out. Nothing is appended when it
        raises. `seen` is for the self-check. With `ranks`, all of them take this step, over the chunks that each holds.
        """
        wanted = every or any(row.kept(len(each)) for row, each in zip(rows, ids, strict=True))
        last = None if wanted else self.last_own
        counts = [len(each) for each in ids]
        step = Step(rows, counts, self.rotary, self.device, last=last, shared=self.shared, ranks=ranks)
        flat = [i for each in ids for i in each]
        kept = range(len(flat)) if every else step.kept
        # in one transfer, which the host does not wait for
        told = torch.tensor([*flat, *step.positions, *kept]).to(self.device, non_blocking=True)
        tokens, positions, keep = torch.split(told, [len(flat), len(flat), len(kept)])
        logits = torch.empty((0, 0))
        cache = _PackedCache()
        by = Absorbing(step, self._latents, cache) if self._latents else step
        with suppress(KVComplete), attending(by, seen=seen):
            logits = (
                self._model(
                    input_ids=tokens[None],
                    position_ids=positions[None],
                    past_key_values=cache,
                    use_cache=False,
                    logits_to_keep=keep,
                )
                .logits[0]
                .float()
            )
        step.commit()
        return logits

    @property
    def last_own(self) -> int:
        """The last layer that has keys and values of its own."""
        return max(layer for layer in range(self.layers) if layer not in self.shared)

    @torch.inference_mode()
    def through(self, ids: Sequence[int], position: int, by: Attending) -> None:
        """Run one sequence from `position` on for its keys and values alone: `by` takes them, and may end the pass."""
        told = torch.tensor([*ids, *range(position, position + len(ids))]).to(self.device, non_blocking=True)
        tokens, positions = torch.split(told, [len(ids), len(ids)])
        cache = _PackedCache()
        by = Absorbing(by, self._latents, cache) if self._latents else by
        with suppress(KVComplete), attending(by):
            self._model(input_ids=tokens[None], position_ids=positions[None], past_key_values=cache, use_cache=False)

    def encode(
        self, chunks: Sequence[Sequence[int]], *, prefix: ChunkKV | None = None, batch_tokens: int = 2048
    ) -> list[ChunkKV]:
        """Prefill chunks to KV, each alone, or after `prefix` (placed from 0): the two encodings.

        Chunks of any length are rows of one step, at most `batch_tokens` tokens together (or one chunk).
        """
        return list(self.encode_each(chunks, prefix=prefix, batch_tokens=batch_tokens))

    def encode_each(
        self, chunks: Sequence[Sequence[int]], *, prefix: ChunkKV | None = None, batch_tokens: int = 2048
    ) -> Iterator[ChunkKV]:
        """`encode`, one at a time and in the order given.

        More tokens at a time would be slower on a processor: what passes from layer to layer then leaves its caches.
        """
        if any(not ids for ids in chunks):
            raise ValueError("a chunk without tokens has no KV")
        start = 0 if prefix is None else prefix.tokens
        seen = () if prefix is None else (Segment(kv=prefix, start=0),)
        for batch in _batches(chunks, batch_tokens):
            rows = [Row.for_kv(seen, position=start) for _ in batch]
            self.step(rows, batch)
            for row in rows:
                yield row.own.chunk_kv(encoded_at=start)

    def cache(self, kv: ChunkKV | None) -> DynamicCache:
        """A plain cache of transformers that holds `kv`, as the model's own code would have filled it."""
        cache = DynamicCache()
        for layer, (key, value) in enumerate(zip(kv.keys, kv.values, strict=True) if kv is not None else ()):
            if not key.shape[0]:  # it reads another layer's
                continue
            if not value.shape[-1]:  # a latent and its rope key, which transformers keeps apart
                key, value = torch.tensor_split(key, [self.config.kv_lora_rank], dim=-1)
            cache.update(key[None], value[None], layer)
        return cache

    @contextmanager
    def plain(self, implementation: str = "sdpa") -> Iterator[Any]:
        """transformers' own model and attention over the same weights, for the self-check and for baselines."""
        capped = getattr(self.config, "attn_logit_softcapping", None) is not None
        eager = capped or (implementation == "sdpa" and not getattr(self._model, "_supports_sdpa", False))
        with torch.inference_mode():
            yield self.with_attention("eager" if eager else implementation)

    @torch.inference_mode()
    def whole(self, ids: Tensor, positions: Tensor, by: Attending) -> Tensor:
        """fp32 logits `(rows, n, vocab)` of whole sequences `(rows, n)` attended `by` a reference, uncached."""
        with attending(by):
            found: Tensor = self._model(
                input_ids=ids,
                position_ids=positions,
                past_key_values=_PackedCache(),
                use_cache=False,
                logits_to_keep=torch.arange(ids.shape[1]).to(ids.device),  # a number has Gemma 4 slice its masks
            ).logits.float()
        return found

    def with_attention(self, name: str) -> Any:
        """transformers' model over the same weights, attending by the registered function `name`."""
        other = twin(self._model)
        other.set_attn_implementation(name)
        return other

    def with_windows(self, sizes: Mapping[int, int]) -> LanguageModel:
        """This model with other sliding windows, old size to new, over the same weights: for the self-check."""
        other = copy.copy(self)
        other._companions = {}  # what it has beside it answers with it, not with this one
        other._model = twin(self._model)
        set_windows(other._model, sizes)
        return other


def _batches(chunks: Sequence[Sequence[int]], batch_tokens: int) -> Iterator[list[Sequence[int]]]:
    """The chunks in order, at most `batch_tokens` tokens at a time, or one chunk."""
    batch: list[Sequence[int]] = []
    for ids in chunks:
        if batch and sum(map(len, batch)) + len(ids) > batch_tokens:
            yield batch
            batch = []
        batch.append(ids)
    if batch:
        yield batch


class _PackedCache(DynamicCache):  # type: ignore[misc]
    """A cache that holds nothing: rows keep their own KV.

    It is there because transformers, given positions that begin anew and no cache, takes the sequence for a packed
    training sample and waits for the device to find that out; and then it masks what is no concern of the rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.given: tuple[int, Tensor, Tensor] | None = None
        """What the model has last given it: the layer, and what it keeps of its new tokens."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.given = (layer_idx, key_states, value_states)
        return key_states, value_states


def _eos_ids(*found: int | list[int] | None) -> frozenset[int]:
    ids: set[int] = set()
    for eos in found:
        ids |= set(eos) if isinstance(eos, list) else set() if eos is None else {eos}
    return frozenset(ids)
