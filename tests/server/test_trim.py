"""Freed memory goes back to the system."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest

from ragkv.server.trim import trim_memory

BLOCK = 64 << 10
"""Below the size at which glibc maps memory of its own, which goes back in any case."""


def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="tells its memory elsewhere")
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_what_lies_between_used_memory_goes_back():
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    blocks = [libc.malloc(BLOCK) for _ in range(2000)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    for block in blocks[:-1]:  # the last one keeps the heap as long as it is
        libc.free(block)
    before = resident()
    trim_memory()
    assert before - resident() > 1000 * BLOCK
    libc.free(blocks[-1])
