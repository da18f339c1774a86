"""A small checkpoint, so that training tests take seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def small_folder(make_folder: Any) -> Path:
    """A checkpoint of two layers: every training test loads it, and most of a load is the self-check."""
    return make_folder("llama-long")
