"""bge-m3 and models in its file layout: dense, sparse and ColBERT vectors of a text from one forward pass.

FlagEmbedding loads the model with its heads and computes the vectors; the loop around it is ragkv's own. The reason is
that FlagEmbedding's `encode` runs its first batch twice, to find a batch size that fits, which doubles the cost of a
question. It also shows progress bars, and turns any fault into an AttributeError after seventeen tries.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from ragkv.errors import ConfigError, ModelLoadError
from ragkv.model.control import harden
from ragkv.retrievers.base import Embedding, ScoreKind
from ragkv.retrievers.encoder import (
    CheckpointModel,
    blank,
    in_batches,
    loading,
    padded,
    readable,
    require_numbers,
    require_weights,
)
from ragkv.retrievers.layout import HEADS, Folder, locate_embedder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["ALL_KINDS", "BGEM3"]

logger = logging.getLogger(__name__)

ALL_KINDS: frozenset[ScoreKind] = frozenset(("dense", "sparse", "colbert"))


class BGEM3(CheckpointModel):
    """The `Embedder` that gives all three kinds of vectors; `modes` limits it to those that are stored.

    Sparse tokens are FlagEmbedding's: the token id as a string. There is a ColBERT vector for every token but the first
    (`<s>`), including `</s>`. The model runs in fp16 on CUDA and in fp32 elsewhere; vectors are float32 and of unit
    length either way.
    """

    def __init__(
        self,
        name: str | Folder,
        *,
        device: str,
        max_tokens: int | None = None,
        modes: Collection[ScoreKind] | None = None,
        batch_size: int = 32,
    ) -> None:
        """`max_tokens` includes special tokens; None is all that the checkpoint supports. `batch_size` counts texts.

        Raises ModelLoadError, or ConfigError for more tokens than the checkpoint has positions for.
        """
        folder = locate_embedder(name) if isinstance(name, str) else name
        self.modes: frozenset[ScoreKind] = ALL_KINDS if modes is None else frozenset(modes)
        if folder.layout != "bge-m3":
            raise ModelLoadError(
                f"Embedder {folder.name!r} has no {' and '.join(HEADS)}: it is not in bge-m3's layout."
            )
        if not self.modes or self.modes - ALL_KINDS:
            raise ConfigError(
                f"Modes of {folder.name!r} are any of {', '.join(sorted(ALL_KINDS))}, not {sorted(self.modes)}."
            )
        super().__init__(folder, max_tokens=max_tokens, batch_size=batch_size)
        self._load(device)

    def embed_documents(self, texts: Sequence[str]) -> Embedding:
        """The vectors of `texts`, in their order. A text is cut off after `max_tokens`, with a warning in the log."""
        import numpy as np

        texts = list(texts)
        rows: list[Any] = [None] * len(texts)
        filled = [i for i, text in enumerate(texts) if not blank(text)]
        with self._lock:
            tokens = self._tokenise([texts[i] for i in filled])
            kept = [(i, ids) for i, ids in zip(filled, tokens, strict=True) if len(ids) > self._specials]
            ids = [row for _, row in kept]
            found = in_batches(ids, self._batch_size, lambda batch: self._forward([ids[i] for i in batch]))
        for (index, _), row in zip(kept, found, strict=True):
            rows[index] = row
        nothing = self._nothing()
        rows = [nothing if row is None else row for row in rows]
        dense = None
        if "dense" in self.modes:
            dense = np.stack([row[0] for row in rows]) if rows else np.zeros((0, self._width), np.float32)
        return Embedding(
            dense=dense,
            sparse=[row[1] for row in rows] if "sparse" in self.modes else None,
            colbert=[row[2] for row in rows] if "colbert" in self.modes else None,
        )

    def embed_query(self, text: str) -> Embedding:
        """As `embed_documents`: bge-m3 expects no instruction before questions."""
        return self.embed_documents([text])

    def _load(self, device: str) -> None:
        from ragkv.model.language import pick_device

        self._device = pick_device(device)
        folder = self._folder.path
        with loading("Embedder", self.name):
            from FlagEmbedding import BGEM3FlagModel

            flag = BGEM3FlagModel(
                str(folder),
                normalize_embeddings=True,
                trust_remote_code=False,
                use_fp16=self._device.type == "cuda",
                devices=str(self._device),
                batch_size=self._batch_size,
                query_max_length=self.max_tokens,
                passage_max_length=self.max_tokens,
            )
            require_weights(flag.model.model, folder, "Embedder", self.name)
            flag.model.to(self._device).eval()
            self._flag = flag  # keep the whole object, because its destructor moves the model to the CPU
            tokenizer = flag.tokenizer
            harden(tokenizer)
            self._width: int = flag.model.config.hidden_size
            self._specials: int = tokenizer.num_special_tokens_to_add()
            special = (tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
            self._weightless = frozenset(token for token in special if token is not None)
            self._forward(self._tokenise(["What is the capital of France?"]))  # a broken model fails now

    def _tokenise(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        encoded = self._flag.tokenizer([readable(text) for text in texts], truncation=True, max_length=self.max_tokens)
        cut = sum(bool(encoding.overflowing) for encoding in encoded.encodings or ())
        if cut:
            logger.warning("%d of %d texts cut off after %d tokens for embedding", cut, len(texts), self.max_tokens)
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def _forward(self, ids: list[list[int]]) -> list[tuple[Any, dict[str, float] | None, Any]]:
        """(dense, sparse, colbert) for each row; None for what is not among the modes."""
        import torch
        from torch.nn.functional import normalize

        batch = padded(ids, self._flag.tokenizer.pad_token_id, self._device)
        with torch.inference_mode():
            out = self._flag.model(
                batch,
                return_dense="dense" in self.modes,
                return_sparse="sparse" in self.modes,
                return_colbert_vecs="colbert" in self.modes,
            )
            # Normalise again, because in fp16 the rows are only approximately of unit length.
            dense, colbert = (
                normalize(out[key].float(), dim=-1).cpu().numpy() if key in out else None
                for key in ("dense_vecs", "colbert_vecs")
            )
            weights = out["sparse_vecs"].squeeze(-1).float().cpu().numpy() if "sparse_vecs" in out else None
        require_numbers(self.name, dense, colbert, weights)
        return [
            (
                None if dense is None else dense[row],
                None if weights is None else self._lexical(tokens, weights[row]),
                None if colbert is None else colbert[row, : len(tokens) - 1].copy(),  # a view would keep the batch
            )
            for row, tokens in enumerate(ids)
        ]

    def _lexical(self, tokens: list[int], weights: NDArray[np.float32]) -> dict[str, float]:
        """The greatest weight of each token that is not special (bge-m3 §3.1: repeated terms count once)."""
        found: dict[str, float] = {}
        for token, weight in zip(tokens, weights.tolist(), strict=False):  # weights of padding are ignored
            if weight > 0 and token not in self._weightless and weight > found.get(key := str(token), 0.0):
                found[key] = weight
        return found

    def _nothing(self) -> tuple[Any, dict[str, float], Any]:
        """The vectors of an empty text, which never is the best match."""
        import numpy as np

        return np.zeros(self._width, np.float32), {}, np.zeros((0, self._width), np.float32)
