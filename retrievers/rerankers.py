"""Cross-encoders such as bge-reranker-v2-m3, which read query and text together and return one raw logit.

FlagEmbedding loads the model, but the loop around it is ragkv's own. FlagEmbedding's `compute_score` runs its first
batch twice, which doubles the cost of a query whose candidates fit one batch. It also decodes tokens to text and
tokenises that text again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ragkv.errors import ConfigError, ModelLoadError
from ragkv.model.checkpoint import pick_device
from ragkv.model.prompt import harden, readable
from ragkv.retrievers.base import Reranker
from ragkv.retrievers.embedders import (
    CheckpointModel,
    Folder,
    in_batches,
    load_plugin,
    loading,
    locate,
    padded,
    require_numbers,
    require_weights,
)
from ragkv.util.plugins import PluginRegistry


class CrossEncoder(CheckpointModel):
    """The `Reranker` over FlagEmbedding's `FlagReranker`, in fp16 on CUDA and in fp32 elsewhere.

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
            logits = in_batches(rows, lambda batch: self._forward([rows[i] for i in batch]))
        self._require_finite(logits)
        return logits

    def _load(self, device: str) -> None:
        import torch

        self._device = pick_device(device)
        folder = self._folder
        with loading("Reranker", self.name):
            from FlagEmbedding import FlagReranker

            flag = FlagReranker(
                str(folder.path),
                trust_remote_code=False,
                use_fp16=self._device.type == "cuda",
                devices=str(self._device),
            )
            labels = flag.model.config.num_labels
            if labels != 1:
                raise ModelLoadError(
                    f"Reranker {self.name!r} has {labels} output classes; give one with a single score."
                )
            require_weights(flag.model, folder.path, "Reranker", self.name)
            flag.model.to(self._device, torch.float16 if self._device.type == "cuda" else torch.float32).eval()
            self._flag = flag  # keep the whole object, because its destructor moves the model to the CPU
            self._tokenizer: Any = flag.tokenizer
            harden(self._tokenizer)  # otherwise a text could contain the separator and pose as another text
            # A broken model fails now.
            self._require_finite(self._forward(self._pairs("What is the capital of France?", ["Paris."])))

    def _pairs(self, question: str, texts: list[str]) -> list[list[int]]:
        """The token ids of question and text; a text is cut where the pair would exceed `max_tokens`."""
        question = self._shortened(readable(question))
        ids: list[list[int]] = self._tokenizer(
            [question] * len(texts),
            [readable(text) for text in texts],
            truncation="only_second",
            max_length=self.max_tokens,
        )["input_ids"]
        return ids

    def _shortened(self, question: str) -> str:
        """The question, or as much of it as fits into three quarters of `max_tokens`."""
        most = self.max_tokens * 3 // 4
        found = self._tokenizer(question, add_special_tokens=False, truncation=True, max_length=most)
        encoding = found.encodings[0]
        return question[: encoding.offsets[-1][1]] if encoding.overflowing else question

    def _forward(self, rows: list[list[int]]) -> list[float]:
        import torch

        batch = padded(rows, self._tokenizer.pad_token_id, self._device)
        with torch.inference_mode():
            logits: list[float] = self._flag.model(**batch, return_dict=True).logits.view(-1).float().tolist()
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
