"""The bundled mini models, in Hugging Face layout: they make everything run with no download."""

from pathlib import Path

__all__ = [
    "embedder_path",
    "lm_path",
    "reranker_path",
]


def lm_path() -> Path:
    """Folder of the bundled language model."""
    return Path(__file__).parent / "lm"


def embedder_path() -> Path:
    """Folder of the bundled embedder, in bge-m3's layout."""
    return Path(__file__).parent / "embedder"


def reranker_path() -> Path:
    """Folder of the bundled reranker, in bge-reranker-v2-m3's layout."""
    return Path(__file__).parent / "reranker"
