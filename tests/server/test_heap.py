"""Freed memory is returned to the system."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ragkv.server.settings import trim_memory

BLOCK = 64 << 10
"""Below the size at which glibc uses mmap, whose memory is always returned."""


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
    for block in blocks[:-1]:  # the last block keeps the heap from shrinking
        libc.free(block)
    before = resident()
    trim_memory()
    assert before - resident() > 1000 * BLOCK
    libc.free(blocks[-1])


THREADS = """
import ctypes, threading
from ragkv.server.settings import limit_heaps
limit_heaps()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
together = threading.Barrier(12)
def take():
    for _ in range(100):
        libc.malloc(1000)
    together.wait()
threads = [threading.Thread(target=take) for _ in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
info = ctypes.create_string_buffer(1 << 20)
libc.fmemopen.restype = ctypes.c_void_p
out = libc.fmemopen(info, ctypes.c_size_t(len(info)), b"w")
libc.malloc_info(0, ctypes.c_void_p(out))
libc.fclose(ctypes.c_void_p(out))
print(info.value.count(b"<heap "))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's")
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
@pytest.mark.parametrize(("variables", "few"), [({}, True), ({"MALLOC_ARENA_MAX": "8"}, False)])
def test_threads_share_few_heaps_unless_the_user_says_otherwise(variables, few):
    others = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", THREADS]
    done = subprocess.run(command, env=others | variables, capture_output=True, text=True, check=True)
    assert (int(done.stdout) <= 2) == few
