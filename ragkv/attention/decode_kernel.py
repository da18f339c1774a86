"""Attention of single queries on a processor: a kernel that numba compiles for this processor.

A decode step has one query per sequence. torch's flash kernel multiplies blocks of matrices, and reads the keys of a
single query at a fifth of the memory's speed. This one is what GPUs have as "paged decode attention" (flash decoding):
it reads keys and values where they lie, in bfloat16, float16 or float32, widens them in registers, and one call serves
all sequences of a layer, however many pieces their keys lie in. All arithmetic is in float32.

What a call is given is `ragkv.attention.decode`'s table. Each query head is computed in blocks of keys with a running
maximum and sum, as FlashAttention does. A kernel is compiled for each kind of numbers, width of heads and number of
query heads that share a key, in a second, and kept in the user's cache folder.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import functools
import math
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from ragkv.util.files import user_folder

BLOCK = 64
"""Keys whose scores are in memory at a time."""
TILE = 8
"""Most query heads that read a key at a time."""
_UNROLL = 4
"""Keys whose values are added at a time."""
_NEEDED = ("avx2", "f16c", "fma")
_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_FAST = ("reassoc", "contract", "nsz")  # not "nnan" and "ninf": a NaN in KV stays one
_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}


def _missing() -> list[str]:
    """What this processor, or the one that numba is told to compile for, lacks. Without F16C LLVM would call a function
    for each float16, which numba does not have for vectors: the process would crash.
    """
    if platform.machine().lower() in ("aarch64", "arm64"):
        return []
    chosen = numba.config.CPU_FEATURES
    features = binding.get_host_cpu_features().flatten() if chosen is None else chosen
    return [name for name in _NEEDED if f"+{name}" not in features.split(",")]


if missing := _missing():
    raise ImportError(f"the processor has no {', '.join(missing)}")


def _loaded(b: Any, address: Any, kind: str, width: int) -> Any:
    """`width` numbers of `kind` from an address on, as a vector of float32."""
    wide = ir.VectorType(_FLOAT, width)
    if kind == "float32":
        return b.load(b.inttoptr(address, wide.as_pointer()), align=4)
    bits = b.load(b.inttoptr(address, ir.VectorType(ir.IntType(16), width).as_pointer()), align=2)
    if kind == "float16":
        return b.fpext(b.bitcast(bits, ir.VectorType(ir.HalfType(), width)), wide)
    words = ir.VectorType(_INT, width)
    return b.bitcast(b.shl(b.zext(bits, words), ir.Constant(words, [16] * width)), wide)


def _repeated(b: Any, number: Any, width: int) -> Any:
    """A vector that has the number `width` times."""
    vector = ir.VectorType(_FLOAT, width)
    undefined, zeros = ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(_INT, width), [0] * width)
    return b.shuffle_vector(b.insert_element(undefined, number, _INT(0)), undefined, zeros)


def _at(b: Any, address: Any, more: int) -> Any:
    return b.add(address, ir.Constant(address.type, more))


def _piece(width: int) -> int:
    return math.gcd(width, 16)


@intrinsic(prefer_literal=True)
def _scores(context: Any, out: Any, query: Any, key: Any, kind: Any, width: Any, rows: Any) -> Any:
    """Write q·k of one key for each of `rows` queries, `(rows, width)`, to a column of `(rows, BLOCK)`."""
    size, d, n, name = _SIZES[kind.literal_value], width.literal_value, rows.literal_value, kind.literal_value

    def generate(_context: Any, b: Any, _signature: Any, arguments: Any) -> None:
        out, query, key = arguments[:3]
        piece = _piece(d)
        sums: list[Any] = [None] * n
        for at in range(0, d, piece):
            numbers = _loaded(b, _at(b, key, at * size), name, piece)
            for row in range(n):
                product = b.fmul(_loaded(b, _at(b, query, 4 * (row * d + at)), "float32", piece), numbers, flags=_FAST)
                sums[row] = product if sums[row] is None else b.fadd(sums[row], product, flags=_FAST)
        vector = ir.VectorType(_FLOAT, piece)
        function = f"llvm.vector.reduce.fadd.v{piece}f32"
        reduce = b.module.globals.get(function) or ir.Function(
            b.module, ir.FunctionType(_FLOAT, [_FLOAT, vector]), function
        )
        for row, each in enumerate(sums):
            total = b.call(reduce, [ir.Constant(_FLOAT, 0.0), each], fastmath=_FAST)
            b.store(total, b.inttoptr(_at(b, out, 4 * BLOCK * row), _FLOAT.as_pointer()))

    return types.void(out, query, key, kind, width, rows), generate


@intrinsic(prefer_literal=True)
def _add(
    context: Any, out: Any, weights: Any, value: Any, stride: Any, kind: Any, width: Any, rows: Any, keys: Any
) -> Any:
    """Add `keys` values, `stride` bytes apart, with a column each of weights `(rows, BLOCK)` to `(rows, width)`."""
    size, d, n, count = _SIZES[kind.literal_value], width.literal_value, rows.literal_value, keys.literal_value
    name = kind.literal_value

    def generate(_context: Any, b: Any, _signature: Any, arguments: Any) -> None:
        out, weights, value, stride = arguments[:4]
        starts = [value]
        for _ in range(count - 1):
            starts.append(b.add(starts[-1], stride))
        piece = _piece(d)
        for at in range(0, d, piece):
            numbers = [_loaded(b, _at(b, start, at * size), name, piece) for start in starts]
            for row in range(n):
                address = _at(b, out, 4 * (row * d + at))
                total = _loaded(b, address, "float32", piece)
                for key, each in enumerate(numbers):
                    place = b.inttoptr(_at(b, weights, 4 * (BLOCK * row + key)), _FLOAT.as_pointer())
                    total = b.fadd(total, b.fmul(_repeated(b, b.load(place), piece), each, flags=_FAST), flags=_FAST)
                b.store(total, b.inttoptr(address, total.type.as_pointer()), align=4)

    return types.void(out, weights, value, stride, kind, width, rows, keys), generate


@intrinsic
def _from_bits(context: Any, bits: Any) -> Any:
    """The float32 that has these bits."""

    def generate(_context: Any, b: Any, _signature: Any, arguments: Any) -> Any:
        return b.bitcast(arguments[0], _FLOAT)

    return types.float32(types.int32), generate


@intrinsic
def _address(context: Any, array: Any) -> Any:
    """Where the numbers of an array begin."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        made = context.make_array(signature.args[0])(context, b, arguments[0])
        return b.ptrtoint(made.data, ir.IntType(64))

    return types.int64(array), generate


@numba.njit(fastmath=set(_FAST))
def _exp(x):
    """e^x for x <= 0 to about 2 units of float32, without a branch; below -87 that of -87 (1e-38)."""
    y = max(x, np.float32(-87.0)) * np.float32(1.44269504)
    whole = math.floor(y)
    part = np.float32(y - whole)
    power = np.float32(1.8775767e-3)  # a polynomial of 2^part
    power = power * part + np.float32(8.9893397e-3)
    power = power * part + np.float32(5.5826318e-2)
    power = power * part + np.float32(2.4015361e-1)
    power = power * part + np.float32(6.9315308e-1)
    power = power * part + np.float32(9.9999994e-1)
    return power * _from_bits((np.int32(whole) + np.int32(127)) << np.int32(23))


@numba.njit(fastmath=set(_FAST))
def _sharpen(scores, row, count, scale, cap, sharp):
    """Scale the scores, and cap them at c·tanh(s/c) if `cap` is not 0."""
    if cap > 0:
        for i in range(count):
            score = scores[row, i] * scale / cap
            power = _exp(np.float32(-2) * abs(score))
            capped = cap * sharp * (np.float32(1) - power) / (np.float32(1) + power)
            scores[row, i] = capped if score > 0 else -capped
    else:
        for i in range(count):
            scores[row, i] *= scale * sharp


@numba.njit(fastmath=True)
def _largest(scores, row, count):
    best = np.float32(-np.inf)
    for i in range(count):
        best = max(best, scores[row, i])
    return best


@numba.njit(fastmath=set(_FAST))
def _weigh(scores, row, count, best):
    """Make the scores e^(score - best); returns their sum."""
    total = np.float32(0)
    for i in range(count):
        scores[row, i] = _exp(scores[row, i] - best)
        total += scores[row, i]
    return total


@functools.cache
def compiled(kind: str, other: str, width: int, value_width: int, rows: int) -> Callable[..., None]:
    """The kernel for keys of `width` and values of `value_width` numbers, of which `rows` query heads read each.

    `attend(queries, out, lse, cos, sin, partners, table, starts, tokens, sharpness, heads, scale, cap, first, last)`
    computes units `first` to `last`, of which each is a part (`starts`), a key head, and up to `rows` of its query
    heads. `queries` `(q_heads, tokens, width)`, `out` `(parts, q_heads, value_width)`, `lse` `(parts, q_heads)`, all in
    float32. KV in rows of the table whose last column is not 0 are of `kind`, others of the `other` one.
    """
    both = kind != other

    def attend(queries, out, lse, cos, sin, partners, table, starts, tokens, sharpness, heads, scale, cap, first, last):
        scores, query = np.empty((rows, BLOCK), np.float32), np.empty((rows, width), np.float32)
        mixed, total = np.empty((rows, value_width), np.float32), np.empty(rows, np.float32)
        p, q, o = _address(scores), _address(query), _address(mixed)
        group = queries.shape[0] // heads
        tiles = (group + rows - 1) // rows
        for unit in range(first, last):
            item, head = unit // (heads * tiles), unit // tiles % heads
            at = head * group + min(unit % tiles * rows, group - rows)
            token, sharp = tokens[item], sharpness[item]
            for row in range(rows):
                lse[item, at + row] = -np.inf
                total[row] = 0
                for i in range(value_width):
                    mixed[row, i] = 0
            for segment in range(starts[item], starts[item + 1]):
                key = table[segment, 0] + head * table[segment, 3]
                value = table[segment, 1] + head * table[segment, 5]
                length, key_token, value_token = table[segment, 2], table[segment, 4], table[segment, 6]
                turn, narrow = table[segment, 7], table[segment, 8]
                for row in range(rows):
                    for i in range(width):
                        number = queries[at + row, token, i]
                        if turn >= 0:
                            number = number * cos[turn, i] + queries[at + row, token, partners[i]] * sin[turn, i]
                        query[row, i] = number
                for begin in range(0, length, BLOCK):
                    count = min(BLOCK, length - begin)
                    for i in range(count):
                        if both and not narrow:
                            _scores(p + 4 * i, q, key, other, width, rows)
                        else:
                            _scores(p + 4 * i, q, key, kind, width, rows)
                        key += key_token
                    for row in range(rows):
                        _sharpen(scores, row, count, scale, cap, sharp)
                        before = lse[item, at + row]
                        best = max(before, _largest(scores, row, count))
                        kept = np.float32(math.exp(before - best))
                        total[row] = total[row] * kept + _weigh(scores, row, count, best)
                        lse[item, at + row] = best
                        if kept != 1:
                            for i in range(value_width):
                                mixed[row, i] *= kept
                    whole = count - count % _UNROLL
                    for i in range(0, whole, _UNROLL):
                        if both and not narrow:
                            _add(o, p + 4 * i, value, value_token, other, value_width, rows, _UNROLL)
                        else:
                            _add(o, p + 4 * i, value, value_token, kind, value_width, rows, _UNROLL)
                        value += _UNROLL * value_token
                    for i in range(whole, count):
                        if both and not narrow:
                            _add(o, p + 4 * i, value, value_token, other, value_width, rows, 1)
                        else:
                            _add(o, p + 4 * i, value, value_token, kind, value_width, rows, 1)
                        value += value_token
            for row in range(rows):
                for i in range(value_width):
                    out[item, at + row, i] = mixed[row, i] / total[row]
                lse[item, at + row] += math.log(total[row])

    signature = types.void(
        types.Array(types.float32, 3, "A"),
        types.float32[:, :, ::1],
        types.float32[:, ::1],
        types.float32[:, ::1],
        types.float32[:, ::1],
        types.int64[::1],
        types.int64[:, ::1],
        types.int64[::1],
        types.int64[::1],
        types.float32[::1],
        types.int64,
        types.float32,
        types.float32,
        types.int64,
        types.int64,
    )
    options = {"nogil": True, "fastmath": set(_FAST), "error_model": "numpy", "boundscheck": False}
    try:
        with _keeping():
            made: Callable[..., None] = numba.njit(signature, cache=True, **options)(attend)
    except Exception:  # no folder that it may be kept in, a full disk, a damaged file; else it is raised again
        made = numba.njit(signature, **options)(attend)
    return made


@contextmanager
def _keeping() -> Iterator[None]:
    """Keep what is compiled in the user's cache folder, unless NUMBA_CACHE_DIR names one. Numba's own choice, beside
    this file, would be left behind there when the package is uninstalled, and hide an editable install.
    """
    before = numba.config.CACHE_DIR
    try:
        if not before:
            folder = user_folder("XDG_CACHE_HOME", ".cache") / "ragkv" / "numba"
            folder.mkdir(parents=True, exist_ok=True)
            numba.config.CACHE_DIR = str(folder)
        yield
    finally:
        numba.config.CACHE_DIR = before
