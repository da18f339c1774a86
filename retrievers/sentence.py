"""Any sentence-transformers model as an embedder of dense vectors, with the model's own prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ragkv.boundary.visible import first_sentence
from ragkv.errors import ConfigError, ModelLoadError, RetrievalError
from ragkv.model.control import harden
from ragkv.retrievers.base import Embedding, ScoreKind
from ragkv.retrievers.encoder import CheckpointModel, blank, loading, readable, require_numbers
from ragkv.retrievers.layout import UNLIMITED, Folder, locate_embedder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["SentenceEmbedder"]


class SentenceEmbedder(CheckpointModel):
    """The `Embedder` for folders with `modules.json`; `encode_query` and `encode_document` choose the prompts."""

    modes: frozenset[ScoreKind] = frozenset(("dense",))

    def __init__(self, name: str | Folder, *, device: str, max_tokens: int | None = None, batch_size: int = 32) -> None:
        """`max_tokens` includes special tokens and the prompt; None is what the model's authors recommend.

        Raises ModelLoadError, or ConfigError for more tokens than the model has positions for.
        """
        folder = locate_embedder(name) if isinstance(name, str) else name
        if folder.layout != "sentence-transformers":
            raise ModelLoadError(
                f"Embedder {folder.name!r} has no modules.json: it is not a sentence-transformers model."
            )
        super().__init__(folder, max_tokens=max_tokens, batch_size=batch_size)
        self._load(device)

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
                model.float()  # some are stored in half precision, in which CPUs are slow and inexact
            self._limit(model)
            _harden(model)
            self._model = model.eval()
            probe = self._encode(["What is the capital of France?"], question=True)  # a broken model fails now
            self._width: int = probe.shape[1]
            require_numbers(self.name, probe)

    def _limit(self, model: Any) -> None:
        """Cut texts at the length limit. Static vectors have none to set, and no use for one."""
        own = getattr(type(model[0]), "max_seq_length", None)
        if isinstance(own, property) and own.fset is None:
            if self.max_tokens < UNLIMITED:
                raise ConfigError(f"Embedder {self.name!r} reads texts of any length; leave max_tokens out.")
        elif self.max_tokens < UNLIMITED:
            model.max_seq_length = self.max_tokens

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
                        f"Embedder {self.name!r} failed on {len(filled)} texts: {first_sentence(error)}; "
                        "lower max_tokens."
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
