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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ragkv.attention.context import EMPTY, AttentionRun, Context, ContextGroup, attend
from ragkv.attention.kv import ChunkKV, OwnKV, PlacedKV
from ragkv.attention.rope import Rotary
from ragkv.attention.visibility import Visible, require_neutral, visible, window_of
from ragkv.errors import ModelLoadError, PromptTooLongError, UnsupportedModelError
from ragkv.model.checkpoint import Checkpoint, require_on_hub, resolve
from ragkv.model.loading import explained, open_checkpoint, quiet_loading
from ragkv.model.prompt import Tokens
from ragkv.model.refusal import refuse_by_name
from ragkv.model.twin import set_windows, twin

__all__ = ["LanguageModel", "pick_device", "quiet_loading"]

logger = logging.getLogger(__name__)

_NAME = "ragkv"


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Visible | None,
    *,
    scaling: float,
    ragkv: AttentionRun | None = None,
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
    out = attend(ragkv, layer, query, key, value, scale=scaling, softcap=softcap, window=window)
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
        self.rotary = _rotary(model, self.config, checkpoint.name)
        generation = getattr(model, "generation_config", None)
        self.eos_ids = _eos_ids(getattr(generation, "eos_token_id", None), tokenizer.eos_token_id)
        self.max_positions: int | None = getattr(self.config, "max_position_embeddings", None)
        holders = (self.config, *model.modules())
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

    def own(self, *, reserve: int = 64) -> OwnKV:
        """An empty cache for a request's own tokens."""
        return OwnKV(self.layers, reserve=reserve)

    @torch.inference_mode()
    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        *,
        context: Context = EMPTY,
        own: OwnKV,
        every: bool = False,
        seen: list[tuple[int, Visible]] | None = None,
    ) -> Tensor:
        """Run new tokens over `context` and `own`, which grows by them.

        `ids` and `positions` are `(batch, n)`, positions consecutive within a row. Returns fp32 logits
        `(batch, vocab)` of the last token, or `(batch, n, vocab)` of `every` token. `seen` is for the self-check.
        """
        run = AttentionRun(context=context, own=own, rotary=self.rotary, positions=positions, seen=seen)
        logits: Tensor = self._model(
            input_ids=ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=0 if every else 1,
            ragkv=run,
        ).logits
        return logits.float() if every else logits[:, -1].float()

    def encode(
        self, chunks: Sequence[Sequence[int]], *, prefix: ChunkKV | None = None, batch_tokens: int = 4096
    ) -> list[ChunkKV]:
        """Prefill chunks to KV, each alone, or after `prefix` (placed from 0): the two encodings.

        Batched by length and padded on the right, where causal attention never looks; the padding's KV is cut off.
        """
        return list(self.encode_each(chunks, prefix=prefix, batch_tokens=batch_tokens))

    def encode_each(
        self, chunks: Sequence[Sequence[int]], *, prefix: ChunkKV | None = None, batch_tokens: int = 4096
    ) -> Iterator[ChunkKV]:
        """`encode`, one at a time and in the order given."""
        if any(not ids for ids in chunks):
            raise ValueError("a chunk without tokens has no KV")
        start = 0 if prefix is None else prefix.tokens
        done: dict[int, ChunkKV] = {}
        for batch in _by_length(chunks, batch_tokens):
            for index, kv in zip(batch, self._encode_batch([chunks[i] for i in batch], start, prefix), strict=True):
                done[index] = kv
        yield from (done[i] for i in range(len(chunks)))

    @torch.inference_mode()
    def _encode_batch(self, chunks: list[Sequence[int]], start: int, prefix: ChunkKV | None) -> list[ChunkKV]:
        width = max(len(ids) for ids in chunks)
        ids = torch.zeros(len(chunks), width, dtype=torch.long, device=self.device)
        for row, chunk in enumerate(chunks):
            ids[row, : len(chunk)] = torch.tensor(chunk, device=self.device)
        positions = torch.arange(start, start + width, device=self.device).expand(len(chunks), -1)
        context = EMPTY if prefix is None else Context(groups=(ContextGroup(chunks=(PlacedKV(kv=prefix, start=0),)),))
        own = self.own(reserve=0)
        self.forward(ids, positions, context=context, own=own)
        return [own.chunk_kv(row, stop=len(chunk), encoded_at=start) for row, chunk in enumerate(chunks)]

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


def _by_length(chunks: Sequence[Sequence[int]], batch_tokens: int) -> list[list[int]]:
    """Indices in batches of similar length, each at most `batch_tokens` when padded (or one chunk)."""
    batches: list[list[int]] = []
    for index in sorted(range(len(chunks)), key=lambda i: (-len(chunks[i]), i)):
        if batches and len(chunks[batches[-1][0]]) * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


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
