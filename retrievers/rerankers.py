"""Cross-encoders such as bge-reranker-v2-m3, which read query and text together and return one raw logit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ragkv.errors import ConfigError
from ragkv.model.checkpoint import pick_device
from ragkv.model.prompt import readable
from ragkv.retrievers.base import Reranker
from ragkv.retrievers.embedders import (
    CheckpointModel,
    Folder,
    in_batches,
    load_plugin,
    loading,
    locate,
    require_numbers,
)
from ragkv.util.plugins import PluginRegistry

if TYPE_CHECKING:
    from ragkv.model.encoder import EncodedText


class CrossEncoder(CheckpointModel):
    """The `Reranker` over a sequence classifier with one label, in fp16 on CUDA and in fp32 elsewhere.

    If a pair exceeds `max_tokens`, the text is truncated. The question may take three quarters of `max_tokens`, as in
    FlagEmbedding, and is truncated beyond that.
    """

    def __init__(self, name: str | Folder, *, device: str, max_tokens: int | None = None) -> None:
        """`max_tokens` is for the whole pair; None is the checkpoint's limit.

        Raises ModelLoadError, or ConfigError for more tokens than the checkpoint has positions for.
        """
        folder = locate(name, "reranker") if isinstance(name, str) else name
        super().__init__(folder, max_tokens=max_tokens)
        if self.max_tokens < 16:
            raise ConfigError(f"max_tokens of a reranker must be at least 16, not {self.max_tokens}.")
        self._load(device)

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle holds the name, and unpickling loads the model again."""
        return partial(type(self), self.name, device=str(self._device), max_tokens=self.max_tokens), ()

    def score(self, question: str, texts: Sequence[str]) -> list[float]:
        """One raw logit per text, in order (`Reranker.score`)."""
        texts = list(texts)
        if not texts:
            return []
        with self._lock:
            rows = self._pairs(question, texts)
            logits = in_batches([row.ids for row in rows], lambda batch: self._forward([rows[i] for i in batch]))
        self._require_finite(logits)
        return logits

    def _load(self, device: str) -> None:
        import torch

        self._device = pick_device(device)
        folder = self._folder
        with loading("Reranker", self.name):
            from ragkv.model.encoder import Classifier, EncoderTokenizer

            dtype = torch.float16 if self._device.type == "cuda" else torch.float32
            self._classifier = Classifier(folder.path, f"Reranker {self.name!r}", self._device, dtype)
            # hardened: otherwise a text could contain the separator and pose as another text
            self._tokenizer = EncoderTokenizer(folder.path, self.max_tokens)
            # A broken model fails now.
            self._require_finite(self._forward(self._pairs("What is the capital of France?", ["Paris."])))

    def _pairs(self, question: str, texts: list[str]) -> list[EncodedText]:
        """The tokens of question and text; a text is cut where the pair would exceed `max_tokens`.

        The question is cut beyond three quarters of `max_tokens`.
        """
        question = self._tokenizer.beginning(readable(question), self.max_tokens * 3 // 4)
        return self._tokenizer([(question, readable(text)) for text in texts])

    def _forward(self, rows: list[EncodedText]) -> list[float]:
        import torch

        with torch.inference_mode():
            logits: list[float] = self._classifier(rows).float().tolist()
        return logits

    def _require_finite(self, logits: list[float]) -> None:
        require_numbers(self.name, np.asarray(logits, np.float32))


RERANKERS = PluginRegistry("ragkv.rerankers")


def load_reranker(name: str, *, device: str, max_tokens: int | None = None) -> Reranker:
    """Load the reranker `name` on `device`; errors as for `load_embedder`."""
    if name in RERANKERS:
        plugin: Reranker = load_plugin(RERANKERS, name, Reranker, device=device, max_tokens=max_tokens)
        return plugin
    return CrossEncoder(name, device=device, max_tokens=max_tokens)


def reranker_fingerprint(name: str) -> str:
    """An identifier of a reranker for stored results, without loading it; for a plug-in, its name."""
    if name in RERANKERS:
        return name
    folder = locate(name, "reranker")
    return folder.fingerprint(folder.max_tokens(None))
