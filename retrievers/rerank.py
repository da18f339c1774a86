"""Cross-encoders, which read question and text together and give one raw logit: bge-reranker-v2-m3 and its like.

FlagEmbedding loads the model; the loop around it is ragkv's own. FlagEmbedding's `compute_score` runs its first batch
twice, and the few dozen candidates of a query are one batch. It also decodes tokens to text and tokenises that again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ragkv.errors import ConfigError, ModelLoadError
from ragkv.model.control import harden
from ragkv.retrievers.encoder import (
    CheckpointModel,
    in_batches,
    loading,
    padded,
    readable,
    require_numbers,
    require_weights,
)
from ragkv.retrievers.layout import Folder, locate_reranker

__all__ = ["CrossEncoder"]


class CrossEncoder(CheckpointModel):
    """The `Reranker` over FlagEmbedding's `FlagReranker`, in fp16 on CUDA and in fp32 elsewhere.

    Where a pair is longer than `max_tokens`, the end of its text is cut off. The question may take three quarters of
    `max_tokens`, as in FlagEmbedding, and is cut only beyond that.
    """

    def __init__(self, name: str | Folder, *, device: str, max_tokens: int | None = None, batch_size: int = 32) -> None:
        """`max_tokens` is for the whole pair; None is all that the checkpoint supports. `batch_size` counts pairs.

        Raises ModelLoadError, or ConfigError for more tokens than the checkpoint has positions for.
        """
        folder = locate_reranker(name) if isinstance(name, str) else name
        super().__init__(folder, max_tokens=max_tokens, batch_size=batch_size)
        if self.max_tokens < 16:
            raise ConfigError(f"max_tokens of a reranker must be at least 16, not {self.max_tokens}.")
        self._load(device)

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle holds the name, and unpickling loads the model again."""
        made = partial(
            type(self), self.name, device=str(self._device), max_tokens=self.max_tokens, batch_size=self._batch_size
        )
        return made, ()

    def score(self, question: str, texts: Sequence[str]) -> list[float]:
        """One raw logit per text, in their order (`Reranker.score`)."""
        texts = list(texts)
        if not texts:
            return []
        with self._lock:
            rows = self._pairs(question, texts)
            logits = in_batches(rows, self._batch_size, lambda batch: self._forward([rows[i] for i in batch]))
        self._require_finite(logits)
        return logits

    def _load(self, device: str) -> None:
        import torch

        from ragkv.model.language import pick_device

        self._device = pick_device(device)
        folder = self._folder
        with loading("Reranker", self.name):
            from FlagEmbedding import FlagReranker

            flag = FlagReranker(
                str(folder.path),
                trust_remote_code=False,
                use_fp16=self._device.type == "cuda",
                devices=str(self._device),
                batch_size=self._batch_size,
                max_length=self.max_tokens,
                normalize=False,
            )
            labels = flag.model.config.num_labels
            if labels != 1:
                raise ModelLoadError(f"Reranker {self.name!r} tells {labels} classes; give one with a single score.")
            require_weights(flag.model, folder.path, "Reranker", self.name)
            flag.model.to(self._device, torch.float16 if self._device.type == "cuda" else torch.float32).eval()
            self._flag = flag  # keep the whole object, because its destructor moves the model to the CPU
            self._tokenizer: Any = flag.tokenizer
            harden(self._tokenizer)  # else a text could hold the separator, and what follows would be another text
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
        import numpy as np

        require_numbers(self.name, np.asarray(logits, np.float32))
