"""Ranks as threads of one process: they share their models, and none is considered lost on a busy machine."""

import functools

import pytest
from rankthreads import WAIT

import ragkv.retrievers
from ragkv.distributed import group
from ragkv.model import self_check


@pytest.fixture(scope="module", autouse=True)
def loaded_once_and_never_late():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self_check, "load_model", functools.cache(self_check.load_model))
        for name in ("load_embedder", "load_reranker"):
            patch.setattr(ragkv.retrievers, name, functools.cache(getattr(ragkv.retrievers, name)))
        patch.setattr(group, "_GRACE", WAIT)
        yield
