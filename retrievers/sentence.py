"""Any sentence-transformers model as an embedder of dense vectors, its own prompts before questions and documents."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ragkv.errors import ConfigError, ModelLoadError, RetrievalError
from ragkv.model.control import harden
from ragkv.retrievers.base import Embedding, ScoreKind
from ragkv.retrievers.encoder import blank, first_line, loading, readable, require_numbers
from ragkv.retrievers.layout import Folder, locate_embedder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["SentenceEmbedder"]


class SentenceEmbedder:
    """The `Embedder` for folders with `modules.json`; `encode_query` and `encode_document` choose the prompts."""

    modes: frozenset[ScoreKind] = frozenset(("dense",))

    def __init__(self, name: str | Folder, *, device: str, max_tokens: int | None = None, batch_size: int = 32) -> None:
        """`max_tokens` counts special tokens and the prompt; None is what the model's authors recommend.

        Raises ModelLoadError, or ConfigError for more tokens than the model has positions for.
        """
        self._folder = locate_embedder(name) if isinstance(name, str) else name
        self.name = self._folder.name
        if self._folder.layout != "sentence-transformers":
            raise ModelLoadError(f"Embedder {self.name!r} has no modules.json: it is no sentence-transformers model.")
        if batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, not {batch_size}.")
        self.max_tokens = self._folder.max_tokens(max_tokens)
        self._batch_size = batch_size
        self._lock = threading.Lock()
        self._load(device)

    @cached_property
    def fingerprint(self) -> str:
        """Read from the files when first asked for (`Embedder.fingerprint`)."""
        return self._folder.fingerprint(self.max_tokens)

    def embed_documents(self, texts: Sequence[str]) -> Embedding:
        """Unit vectors of `texts`, in their order."""
        return self._embed(texts, question=False)

    def embed_query(self, text: str) -> Embedding:
        """The unit vector of a question."""
        return self._embed([text], question=True)

    def _load(self, device: str) -> None:
        from ragkv.model.language import pick_device

        place = pick_device(device)
        with loading("Embedder", self.name, reports=True):
            from sentence_transformers import SentenceTransformer

            model = SentenceTransformer(
                str(self._folder.path), device=str(place), local_files_only=True, trust_remote_code=False
            )
            if place.type == "cpu":
                model.float()  # some are stored in half precision, which CPUs are slow and coarse in
            model.max_seq_length = self.max_tokens
            _harden(model)
            self._model = model.eval()
            probe = self._encode(["What is the capital of France?"], question=True)  # a broken model fails here, once
            self._width: int = probe.shape[1]
            require_numbers(self.name, probe)

    def _embed(self, texts: Sequence[str], *, question: bool) -> Embedding:
        import numpy as np

        texts = list(texts)
        filled = [i for i, text in enumerate(texts) if not blank(text)]
        dense = np.zeros((len(texts), self._width), np.float32)
        if filled:
            with self._lock:
                try:
                    dense[filled] = self._encode([readable(texts[i]) for i in filled], question=question)
                except RuntimeError as error:
                    raise RetrievalError(
                        f"Embedder {self.name!r} failed on {len(filled)} texts: {first_line(error)}; lower max_tokens."
                    ) from error
        require_numbers(self.name, dense)
        return Embedding(dense=dense)

    def _encode(self, texts: list[str], *, question: bool) -> NDArray[np.float32]:
        encode = self._model.encode_query if question else self._model.encode_document
        found = encode(
            texts,
            batch_size=self._batch_size,
            show_progress_bar=False,
            convert_to_numpy=True,
            normalize_embeddings=True,
        )
        vectors: NDArray[np.float32] = found.astype("float32", copy=False)
        return vectors


def _harden(model: Any) -> None:
    """Keep special tokens out of texts, unless a prompt of the model's own holds one."""
    tokenizer: Any = getattr(model, "tokenizer", None)
    if not hasattr(tokenizer, "split_special_tokens"):
        return
    if not any(name in prompt for name in tokenizer.all_special_tokens for prompt in (model.prompts or {}).values()):
        harden(tokenizer)
