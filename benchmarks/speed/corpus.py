"""Generated documents of any number, and the smallest models that can index them.

Each document has a word of its own, so that a question about it has one right answer; all other words are drawn by
Zipf and Mandelbrot's law. The models are real ones with random weights: a Llama of one layer, whose KV takes a kilobyte
per chunk, and a table of static vectors. So an index of them is made and asked as any other, and what is measured is
what ragkv does around its models.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ragkv.ingest import ReadyDocument
from ragkv.ingest.ready import ReadyChunk
from ragkv.types import Document

__all__ = ["CHUNKS", "TOPICS", "Corpus", "make_language_model", "make_models"]

CHUNKS = 8
"""Chunks of a document."""
WORDS = 64
"""Words of a chunk."""
TOPICS = 10
"""Values of the documents' metadata `topic`."""
VOCABULARY = 20_000
WIDTH = 64
"""Numbers of a chunk's vector."""
_ONSETS = ("b", "br", "d", "f", "g", "gr", "h", "k", "l", "m", "n", "p", "pr", "r", "s", "st", "t", "v", "w", "z")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ei", "ou")


def vocabulary() -> list[str]:
    """The words, the most frequent first: numbers written in syllables, each word its own."""
    syllables = [onset + vowel for onset in _ONSETS for vowel in _VOWELS]
    base = len(syllables)
    return [syllables[at % base] + "n" + syllables[at // base % base] for at in range(VOCABULARY)]


@dataclass(frozen=True)
class Corpus:
    """`size` chunks in documents of `CHUNKS`, the last one with what is left. The same numbers give the same texts."""

    size: int

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return -(-self.size // CHUNKS)

    @cached_property
    def _words(self) -> np.ndarray[Any, np.dtype[np.str_]]:
        return np.array(vocabulary())

    @cached_property
    def _shares(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        weights = 1 / (np.arange(VOCABULARY) + 10.0)
        shares: np.ndarray[Any, np.dtype[np.float64]] = np.cumsum(weights) / weights.sum()
        return shares

    def document(self, number: int, version: int = 0) -> ReadyDocument:
        """The document with this number; another version has other texts, and other chunk ids."""
        count = min(CHUNKS, self.size - number * CHUNKS)
        rng = np.random.default_rng([number, version])
        drawn = self._words[np.searchsorted(self._shares, rng.random((count, WORDS - 1))) % VOCABULARY]
        texts = [f"{self.name(number)} {' '.join(row)}." for row in drawn.tolist()]
        starts = [sum(len(text) + 2 for text in texts[:at]) for at in range(count)]
        return ReadyDocument(
            document=Document(
                document_id=self.document_id(number),
                source=f"{self.document_id(number)}.txt",
                content_hash=f"{number}-{version}",
                metadata={"topic": f"t{number % TOPICS}"},
            ),
            text="\n\n".join(texts),
            chunks=[
                ReadyChunk(chunk_id=f"{self.document_id(number)}-{version}-{at}", text=text, start=start)
                for at, (text, start) in enumerate(zip(texts, starts, strict=True))
            ],
        )

    def document_id(self, number: int) -> str:
        return f"doc-{number:07}"

    def name(self, number: int) -> str:
        """The word that only this document has."""
        return f"zed{number:07}"

    def question(self, number: int) -> str:
        """A question about the document with this number, in eight words."""
        rng = np.random.default_rng([number, 1 << 31])
        words = self._words[np.searchsorted(self._shares, rng.random(7)) % VOCABULARY]
        return f"{' '.join(words.tolist())} {self.name(number)}?"


def make_models(folder: Path) -> tuple[Path, Path]:
    """The checkpoints of the language model and of the embedder under `folder`, which are made if they are missing.

    They are made in one step each, and from a seed: whoever makes them again gets the same fingerprints.
    """
    made = folder / "model", folder / "embedder"
    for path, make in zip(made, (make_language_model, _embedder), strict=True):
        if not path.exists():
            unfinished = path.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            make(unfinished)
            unfinished.rename(path)
    return made


def _tokenizer() -> Any:
    """One token per word; words that only one document has are unknown to it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["<unk>", "<s>", "</s>", *vocabulary()]
    tokenizer = Tokenizer(models.WordLevel({name: at for at, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def make_language_model(folder: Path, **shape: float) -> None:
    """A Llama with random weights and a token per word of a corpus; without a shape, the smallest there can be."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from ragkv.model.language import quiet_loading

    torch.manual_seed(0)
    least: dict[str, Any] = {
        "hidden_size": 4,
        "intermediate_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    config = LlamaConfig(
        vocab_size=VOCABULARY + 3,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        **{**least, **shape},
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    with quiet_loading(reports=False):
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=_tokenizer(), model_max_length=4096, **names).save_pretrained(folder)


def _embedder(folder: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    weights = np.random.default_rng(0).standard_normal((VOCABULARY + 3, WIDTH), dtype=np.float32)
    table = StaticEmbedding(_tokenizer(), embedding_weights=weights)
    SentenceTransformer(modules=[table], device="cpu").save(str(folder), create_model_card=False)
