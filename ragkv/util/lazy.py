"""Modules that are imported when they are first used: a question that computes nothing by torch does not load it."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any


def torch_if_loaded() -> Any:
    """The module `torch` if this process uses it already, else None."""
    if "torch" not in sys.modules:
        return None
    import torch  # waits for the thread that imports it

    return torch


class LazyModule:
    """A module that is imported when one of its attributes is first read, so that a process that needs none of them
    does not load it.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)
