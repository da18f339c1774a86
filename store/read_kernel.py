"""Check and copy stored bytes in one call that does not hold the GIL.

Otherwise threads that read KV for a device would wait for each other at each segment, and a running answer would wait
for all of them. The checksum is xxhash's own function, which its extension module exports. If it does not, importing
this module raises ImportError, and `decode_segments` does the same work.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from ragkv.util.kernels import ARGUMENTS, LONG, argument, claimed, compiled, emits, function, integers, once, run

Bytes = NDArray[np.uint8]

_FIRST = ARGUMENTS + 4


def _exported() -> int:
    """The address of xxhash's XXH3_64bits(address, size)."""
    try:
        library = ctypes.CDLL(xxhash._xxhash.__file__)  # type: ignore[attr-defined]
        function = getattr(library, "XXH3_64bits_dispatch", None) or library.XXH3_64bits
    except (AttributeError, OSError) as error:
        raise ImportError(f"xxhash does not export its function: {error}") from error
    function.restype, function.argtypes = ctypes.c_uint64, (ctypes.c_char_p, ctypes.c_size_t)
    for data in (b"", b"ragkv", bytes(range(256)) * 5):
        if function(data, len(data)) != xxhash.xxh3_64_intdigest(data):
            raise ImportError("xxhash exports another function")
    return ctypes.cast(function, ctypes.c_void_p).value or 0


_XXH3 = _exported()


@emits(types.int64, types.int64, types.int64, types.int64)
def _digest(b: Any, hashes: Any, place: Any, nbytes: Any) -> Any:
    """Call the function at `hashes` on some bytes."""
    kind = ir.FunctionType(LONG, (LONG, LONG))
    return b.call(b.inttoptr(hashes, kind.as_pointer()), [place, nbytes])


@emits(types.int64, types.int64, types.int64, types.int64)
def _copied(b: Any, target: Any, source: Any, nbytes: Any) -> Any:
    """Copy some bytes; returns the address behind the last of them."""
    place, flag = ir.IntType(8).as_pointer(), ir.IntType(1)
    copy = function(b, "llvm.memcpy.p0.p0.i64", ir.VoidType(), place, place, LONG, flag)
    b.call(copy, [b.inttoptr(target, place), b.inttoptr(source, place), nbytes, flag(0)])
    return b.add(target, nbytes)


def _check_and_copy(data):
    """The kernel's arguments: the checksum function; where to write the number of correct segments; the number of
    segments; the target's address; and for each segment its address, size, checksum and number of parts, followed by
    the parts' addresses and sizes.
    """
    claimed(data)
    hashes, segments = argument(data, ARGUMENTS), argument(data, ARGUMENTS + 2)
    target, place, right = argument(data, ARGUMENTS + 3), _FIRST, 0
    while right < segments:
        if _digest(hashes, argument(data, place), argument(data, place + 1)) != argument(data, place + 2):
            break
        parts = argument(data, place + 3)
        place += 4
        for _ in range(parts):
            target = _copied(target, argument(data, place), argument(data, place + 1))
            place += 2
        right += 1
    integers(argument(data, ARGUMENTS + 1))[0] = right


@once
def _kernel() -> Any:
    return compiled(_check_and_copy)


def copy_checked(segments: Sequence[tuple[Bytes, int, Sequence[Bytes]]], out: Bytes) -> bool:
    """Copy the parts of each segment `(its bytes, their XXH3, its parts)` into `out`, one after another. False if a
    checksum does not match, or if the parts do not fill `out`.
    """
    numbers, total = list[int](), 0
    for held, digest, parts in segments:
        numbers += held.__array_interface__["data"][0], held.size, digest, len(parts)
        for part in parts:
            numbers += numbers[-4:-2] if part is held else (part.__array_interface__["data"][0], part.size)
            total += part.size
    if total != out.size:
        return False
    right, target = ctypes.c_int64(0), out.__array_interface__["data"][0]
    run(_kernel(), 1, 1, _XXH3, ctypes.addressof(right), len(segments), target, *numbers)
    return right.value == len(segments)
