"""The bundled models in Hugging Face layout, which make everything run with no download, and the adapter of smollm2."""

from pathlib import Path

__all__ = [
    "embedder_path",
    "lm_path",
    "reranker_path",
    "smollm2_adapter_path",
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


def smollm2_adapter_path() -> Path:
    """Folder of the bundled LoRA adapter that tunes SmolLM2-135M-Instruct to answer from passages, in peft's layout."""
    return Path(__file__).parent / "smollm2"
