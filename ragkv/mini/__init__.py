"""The bundled mini models, in Hugging Face layout: they make everything run with no download."""

from pathlib import Path

__all__ = ["lm_path"]


def lm_path() -> Path:
    """Folder of the bundled language model."""
    return Path(__file__).parent / "lm"
