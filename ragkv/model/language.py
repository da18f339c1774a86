"""A causal language model as ragkv runs it: the one file that touches transformers' internals.

Any supported checkpoint of transformers is loaded unchanged; only its attention function is ragkv's, registered
under one name, and everything that a request needs reaches it as a call argument. There is no module-level state
and no patch: threads and engines share a model freely.
"""

from __future__ import annotations

import copy
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

from ragkv.attention.kv import ChunkKV, KVShape, Segment
from ragkv.attention.rope import Rotary
from ragkv.attention.row import Row
from ragkv.attention.step import KVComplete, Step
from ragkv.attention.visibility import Visible, require_neutral, visible, window_of
from ragkv.errors import ModelLoadError, PromptTooLongError, UnsupportedModelError
from ragkv.model.checkpoint import Checkpoint, require_on_hub, resolve
from ragkv.model.loading import explained, open_checkpoint, quiet_loading
from ragkv.model.prompt import Tokens
from ragkv.model.refusal import refuse_by_name
from ragkv.model.twin import set_windows, twin
from ragkv.types import Need

__all__ = ["LanguageModel", "pick_device", "quiet_loading"]

logger = logging.getLogger(__name__)

_NAME = "ragkv"
T = TypeVar("T")


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Visible | None,
    *,
    scaling: float,
    ragkv: Step | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The registered attention function: `(batch, heads, n, head_dim)` in, `(batch, n, heads, head_dim)` out."""
    if ragkv is None:
        raise UnsupportedModelError(
            "its layers do not hand call arguments through to their attention, where ragkv's KV must arrive"
        )
    if is_causal is False:
        raise UnsupportedModelError("its attention looks ahead")
    require_neutral(others)
    window = window_of(attention_mask, sliding_window)
    layer: int = module.layer_idx  # type: ignore[assignment]
    if ragkv.seen is not None and attention_mask is not None:
        ragkv.seen.append((layer, attention_mask))
    out = ragkv.attend(layer, query, key, value, scale=scaling, softcap=softcap, window=window)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, visible)


class LanguageModel:
    """A loaded model: encodes chunks to KV and runs tokens against a context.

    Build one with `LanguageModel.load`, which also makes the model prove itself.
    """

    def __init__(self, model: Any, tokenizer: Any, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.tokens = Tokens(tokenizer)
        self.config = model.config.get_text_config(decoder=True)
        refuse_by_name(checkpoint.name, self.config)
        self._model = model.eval()
        self._model.set_attn_implementation(_NAME)
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.layers: int = self.config.num_hidden_layers
        self.lacks: Mapping[Need, str] = {}
        """What the engines may need that this model does not bear, and why: the proof on load finds it out."""
        self.rotary = _rotary(model, self.config, checkpoint.name)
        generation = getattr(model, "generation_config", None)
        self.eos_ids = _eos_ids(getattr(generation, "eos_token_id", None), tokenizer.eos_token_id)
        self.max_positions: int | None = getattr(self.config, "max_position_embeddings", None)
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
        from ragkv.model.proof import check_model

        checkpoint = resolve(name)
        if not checkpoint.local:
            require_on_hub(name, revision=revision)
        model, tokenizer = open_checkpoint(checkpoint, dtype=dtype, device=pick_device(device), revision=revision)
        with explained("Model", name), quiet_loading(reports=False):
            loaded = cls(model, tokenizer, checkpoint)
        check_model(loaded)
        return loaded

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
                f"The prompt needs {last} positions but model {self.checkpoint.name!r} has {self.max_positions}; "
                "lower --top-k or ask a shorter question."
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
        [made] = self.encode([(0,)])
        return made.shape

    @torch.inference_mode()
    def step(
        self,
        rows: Sequence[Row],
        ids: Sequence[Sequence[int]],
        *,
        every: bool = False,
        seen: list[tuple[int, Visible]] | None = None,
    ) -> Tensor:
        """One forward pass: `ids[i]` are appended to `rows[i]`, which may differ in length, place and context.

        Returns fp32 logits `(rows, vocab)` of each row's last token (of a `Stack`, of the tokens that it wants), or
        `(tokens, vocab)` of `every` token, in order.
        Where nobody wants logits, what follows the last layer's keys and values is left out. Nothing is appended when
        it raises. `seen` is for the self-check.
        """
        wanted = every or any(row.kept(len(each)) for row, each in zip(rows, ids, strict=True))
        last = None if wanted else self.layers - 1
        step = Step(rows, [len(each) for each in ids], self.rotary, self.device, seen=seen, last=last)
        flat = [i for each in ids for i in each]
        kept = range(len(flat)) if every else step.kept
        # in one transfer, which the host does not wait for
        told = torch.tensor([*flat, *step.positions, *kept]).to(self.device, non_blocking=True)
        tokens, positions, keep = torch.split(told, [len(flat), len(flat), len(kept)])
        logits = torch.empty((0, 0))
        with suppress(KVComplete):
            logits = (
                self._model(
                    input_ids=tokens[None],
                    position_ids=positions[None],
                    past_key_values=_PackedCache(),
                    use_cache=False,
                    logits_to_keep=keep,
                    ragkv=step,
                )
                .logits[0]
                .float()
            )
        step.commit()
        return logits

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

    @contextmanager
    def plain(self, implementation: str = "sdpa") -> Iterator[Any]:
        """transformers' own model and attention over the same weights, for the self-check and for baselines."""
        capped = getattr(self.config, "attn_logit_softcapping", None) is not None
        with torch.inference_mode():
            yield self.with_attention("eager" if capped else implementation)

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


def pick_device(device: str | None) -> torch.device:
    """The device asked for, or CUDA where there is one, else the CPU."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        raise ModelLoadError(f"Device {device!r} is not available: {str(error).splitlines()[0]}") from error
    return found


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

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states


def _rotary(model: Any, config: Any, name: str) -> Rotary:
    """The model's own rotary functions, with the layers that have no RoPE found by trying."""
    decoder = model.get_decoder()
    embedding = getattr(decoder, "rotary_emb", None)
    attention = next(
        (m for m in decoder.modules() if hasattr(m, "layer_idx") and "Attention" in type(m).__name__), None
    )
    apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if embedding is None or apply is None:
        part = "no rotary embedding for all its layers" if embedding is None else "no function that applies its RoPE"
        raise UnsupportedModelError(
            f"Model {name!r} ({config.model_type}) is not supported: it has {part} where ragkv looks."
        )
    typed = "layer_type" in inspect.signature(embedding.forward).parameters
    width = torch.zeros(1, device=model.device)

    def angles(positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        cos, sin = embedding(width, positions, kind) if typed else embedding(width, positions)
        scaling = getattr(embedding, f"{kind}_attention_scaling" if typed else "attention_scaling", 1.0)
        return cos / scaling, sin / scaling

    layers = config.num_hidden_layers
    kinds: tuple[str | None, ...] = tuple(config.layer_types[:layers]) if typed else ("default",) * layers
    return Rotary(apply=apply, angles=angles, kinds=kinds)


def _eos_ids(*found: int | list[int] | None) -> frozenset[int]:
    ids: set[int] = set()
    for eos in found:
        ids |= set(eos) if isinstance(eos, list) else set() if eos is None else {eos}
    return frozenset(ids)
