"""Attention of single queries on a processor: a kernel that numba compiles for this processor.

A decode step has one query per sequence. torch's flash kernel is built for blocks of queries, and reads the keys of a
single query at a fifth of the memory bandwidth. This kernel is the CPU's "paged decode attention" (flash decoding): it
reads keys and values in place, in bfloat16, float16 or float32, widens them in registers, and one call serves all
sequences of a layer, however many separate buffers hold their keys. All arithmetic is in float32.

The input of a call is the table of `ragkv.attention.in_place`. Each query head is computed in blocks of keys with a
running maximum and sum, as in FlashAttention. A kernel is compiled for each dtype, head width and number of query heads
per key head, which takes a second (`ragkv.util.kernels`).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types

from ragkv.types import MOST
from ragkv.util import kernels
from ragkv.util.kernels import (
    FAST,
    FLOAT,
    INT,
    LITERAL,
    LONG,
    POLYNOMIAL,
    address,
    argument,
    claimed,
    emits,
    float_of,
    integers,
    pointer_to,
    reals,
    repeated,
    widened,
)

BLOCK = 64
"""Keys per block: their scores are in memory together."""
TILE = 8
"""The most query heads that read a key together."""
COLUMNS = 10
"""Numbers in a row of the table."""
_UNROLL = 4
"""Keys whose values are added together. Scores are computed for as many keys at a time, or half as many for more query
heads than that; their accumulators are in registers.
"""
_AHEAD = 4096
"""Prefetch distance of keys and values, in bytes."""
QUERIES, OUT, LSE, COS, SIN, PARTNERS, TABLE, STARTS, TOKENS, SHARPNESS = range(
    kernels.ARGUMENTS, kernels.ARGUMENTS + 10
)
HEADS, GROUP, HEAD_STEP, TOKEN_STEP, SCALE, CAP = range(SHARPNESS + 1, SHARPNESS + 7)
"""The kernel's arguments (`compiled`)."""


def _starts(b: Any, first: Any, stride: Any, count: int, size: int) -> list[Any]:
    """Addresses of `count` keys or values of `size` bytes; prefetches later ones."""
    starts = [first]
    for _ in range(count - 1):
        starts.append(b.add(starts[-1], stride))
    for start in starts:
        for line in range(0, size, 64):
            kernels.prefetch(b, pointer_to(b, start, _AHEAD + line))
    return starts


def _by_kind(b: Any, code: Any, kinds: str, generate: Callable[[str], None]) -> None:
    """Generate code for each of `kinds`, and a branch on `code` that selects one at run time."""
    names = kinds.split(",")
    if len(set(names)) == 1:
        generate(names[0])
        return
    blocks, end = {name: b.append_basic_block() for name in dict.fromkeys(names)}, b.append_basic_block()
    switch = b.switch(code, blocks[names[0]])
    for number, name in enumerate(names[1:], 1):
        switch.add_case(LONG(number), blocks[name])
    for name, block in blocks.items():
        b.position_at_end(block)
        generate(name)
        b.branch(end)
    b.position_at_end(end)


@emits(types.void, *[types.int64] * 5, *[LITERAL] * 4)
def _scores(
    b: Any, out: Any, query: Any, key: Any, stride: Any, code: Any, kinds: str, width: int, rows: int, keys: int
) -> None:
    """Write q·k of 1, 2 or 4 keys, `stride` bytes apart, for each of `rows` queries `(rows, width)`, to as many columns
    of a `(rows, BLOCK)` matrix.
    """

    def generate(name: str) -> None:
        size = kernels.SIZES[name]
        starts = _starts(b, key, stride, keys, width * size)
        lanes = kernels.vector_width(width)
        sums: list[list[Any]] = [[None] * keys for _ in range(rows)]
        for i in range(0, width, lanes):
            numbers = [widened(b, pointer_to(b, start, i * size), name, lanes) for start in starts]
            for row in range(rows):
                one = widened(b, pointer_to(b, query, 4 * (row * width + i)), "float32", lanes)
                for k, each in enumerate(numbers):
                    product = b.fmul(one, each, flags=FAST)
                    sums[row][k] = product if i == 0 else b.fadd(sums[row][k], product, flags=FAST)
        scales = ir.Constant(kernels.floats(keys), [1.0] * keys)
        for k, start in enumerate(starts if name == "int8" else ()):
            largest = b.extract_element(widened(b, pointer_to(b, start, width), "bfloat16", 1), INT(0))
            scales = b.insert_element(scales, b.fmul(largest, FLOAT(1 / MOST)), INT(k))
        for row in range(rows):
            total = kernels.summed(b, sums[row])
            total = b.fmul(total, scales, flags=FAST) if name == "int8" else total
            kernels.store(b, total, pointer_to(b, out, 4 * BLOCK * row), 4)

    _by_kind(b, code, kinds, generate)


@emits(types.float32, types.int64, types.int64, LITERAL)
def _number(b: Any, start: Any, index: Any, kind: str) -> Any:
    """Load element `index` of an array of this kind at an address."""
    one = widened(b, b.add(start, b.mul(index, LONG(kernels.SIZES[kind]))), kind, 1)
    return b.extract_element(one, INT(0))


@emits(types.void, *[types.int64] * 5, *[LITERAL] * 4)
def _add(
    b: Any, out: Any, weights: Any, value: Any, stride: Any, code: Any, kinds: str, width: int, rows: int, keys: int
) -> None:
    """Accumulate `keys` values, `stride` bytes apart, into `(rows, width)`, weighted by columns of `(rows, BLOCK)`."""

    def generate(name: str) -> None:
        size = kernels.SIZES[name]
        starts = _starts(b, value, stride, keys, width * size)
        lanes = kernels.vector_width(width)
        for i in range(0, width, lanes):
            numbers = [widened(b, pointer_to(b, start, i * size), name, lanes) for start in starts]
            for row in range(rows):
                place = pointer_to(b, out, 4 * (row * width + i))
                total = widened(b, place, "float32", lanes)
                for key, each in enumerate(numbers):
                    weight = kernels.load(b, pointer_to(b, weights, 4 * (BLOCK * row + key)), FLOAT, 4)
                    total = b.fadd(total, b.fmul(repeated(b, weight, lanes), each, flags=FAST), flags=FAST)
                kernels.store(b, total, place, 4)

    _by_kind(b, code, kinds, generate)


@numba.njit(fastmath=set(FAST))
def exponential(x):
    """e^x for x <= 0 to about 2 ulp of float32, without a branch; clamped at -87 (1e-38)."""
    y = max(x, np.float32(-87.0)) * np.float32(1.44269504)
    whole = math.floor(y)
    part = np.float32(y - whole)
    power = np.float32(POLYNOMIAL[0])
    for each in POLYNOMIAL[1:]:
        power = power * part + np.float32(each)
    return power * float_of((np.int32(whole) + np.int32(127)) << np.int32(23))


@numba.njit(fastmath=set(FAST))
def _sharpen(scores, row, count, scale, cap, sharp):
    """Scale the scores, and cap them at c·tanh(s/c) if `cap` is not 0."""
    if cap > 0:
        for i in range(count):
            score = scores[row, i] * scale / cap
            power = exponential(np.float32(-2) * abs(score))
            capped = cap * sharp * (np.float32(1) - power) / (np.float32(1) + power)
            scores[row, i] = capped if score > 0 else -capped
    else:
        for i in range(count):
            scores[row, i] *= scale * sharp


@numba.njit(fastmath=True)
def largest(scores, row, count):
    best = np.float32(-np.inf)
    for i in range(count):
        best = max(best, scores[row, i])
    return best


@numba.njit(fastmath=set(FAST))
def weigh(scores, row, count, best):
    """Replace the scores by e^(score - best); returns their sum."""
    total = np.float32(0)
    for i in range(count):
        scores[row, i] = exponential(scores[row, i] - best)
        total += scores[row, i]
    return total


@kernels.once
def compiled(kinds: str, width: int, value_width: int, rows: int) -> Any:
    """The kernel for keys of `width` and values of `value_width` numbers, each read by `rows` query heads.

    A work unit is a part (STARTS), a key head, and up to `rows` of its query heads. The arguments are addresses:
    queries of the first of the `kinds`, whose heads and tokens are HEAD_STEP and TOKEN_STEP numbers apart; OUT
    `(parts, q_heads, value_width)` and LSE `(parts, q_heads)` in float32; the rotations and the table. Then come the
    numbers of key heads and of query heads per key head, and the bits of scale and cap in float32. A row of the table
    says which of the `kinds` ("float32,float16,int8") its keys and values have.
    """
    kind, int8, some = kinds.split(",")[0], "int8" in kinds, _UNROLL if rows <= _UNROLL else _UNROLL // 2
    part = np.float32(1 / MOST)

    def attend(data):
        queries, out, lse = argument(data, QUERIES), reals(argument(data, OUT)), reals(argument(data, LSE))
        cos, sin = reals(argument(data, COS)), reals(argument(data, SIN))
        partners, table = integers(argument(data, PARTNERS)), argument(data, TABLE)
        starts, tokens = integers(argument(data, STARTS)), integers(argument(data, TOKENS))
        sharpness = reals(argument(data, SHARPNESS))
        heads, group = argument(data, HEADS), argument(data, GROUP)
        head_step, token_step = argument(data, HEAD_STEP), argument(data, TOKEN_STEP)
        scale, cap = float_of(np.int32(argument(data, SCALE))), float_of(np.int32(argument(data, CAP)))
        scores, query = np.empty((rows, BLOCK), np.float32), np.empty((rows, width), np.float32)
        mixed, total = np.empty((rows, value_width), np.float32), np.empty(rows, np.float32)
        p, q, o = address(scores), address(query), address(mixed)
        tiles = (group + rows - 1) // rows
        units, chunk = argument(data, kernels.UNITS), argument(data, kernels.CHUNK)
        while True:
            first = claimed(data)
            if first >= units:
                return
            for unit in range(first, min(first + chunk, units)):
                item, head = unit // (heads * tiles), unit // tiles % heads
                top = head * group + min(unit % tiles * rows, group - rows)
                token, sharp, into = tokens[item], sharpness[item], item * heads * group + top
                for row in range(rows):
                    lse[into + row] = -np.inf
                    total[row] = 0
                    for i in range(value_width):
                        mixed[row, i] = 0
                for segment in range(starts[item], starts[item + 1]):
                    found = integers(table + 8 * COLUMNS * segment)
                    key, value = found[0] + head * found[3], found[1] + head * found[5]
                    length, key_token, value_token, rotation, code = found[2], found[4], found[6], found[7], found[8]
                    for row in range(rows):
                        place = (top + row) * head_step + token * token_step
                        for i in range(width):
                            number = _number(queries, place + i, kind)
                            if rotation >= 0:
                                other_one = _number(queries, place + partners[i], kind)
                                number = number * cos[rotation * width + i] + other_one * sin[rotation * width + i]
                            query[row, i] = number
                    for begin in range(0, length, BLOCK):
                        count = min(BLOCK, length - begin)
                        whole = count - count % some
                        for i in range(0, whole, some):
                            _scores(p + 4 * i, q, key, key_token, code, kinds, width, rows, some)
                            key += some * key_token
                        for i in range(whole, count):
                            _scores(p + 4 * i, q, key, key_token, code, kinds, width, rows, 1)
                            key += key_token
                        for row in range(rows):
                            _sharpen(scores, row, count, scale, cap, sharp)
                            before = lse[into + row]
                            best = max(before, largest(scores, row, count))
                            factor = np.float32(math.exp(before - best))
                            total[row] = total[row] * factor + weigh(scores, row, count, best)
                            lse[into + row] = best
                            if factor != 1:
                                for i in range(value_width):
                                    mixed[row, i] *= factor
                        if int8 and code == 2:
                            for i in range(count):
                                one = _number(value + i * value_token + value_width, 0, "bfloat16") * part
                                for row in range(rows):
                                    scores[row, i] *= one
                        whole = count - count % _UNROLL
                        for i in range(0, whole, _UNROLL):
                            _add(o, p + 4 * i, value, value_token, code, kinds, value_width, rows, _UNROLL)
                            value += _UNROLL * value_token
                        for i in range(whole, count):
                            _add(o, p + 4 * i, value, value_token, code, kinds, value_width, rows, 1)
                            value += value_token
                for row in range(rows):
                    for i in range(value_width):
                        out[(into + row) * value_width + i] = mixed[row, i] / total[row]
                    lse[into + row] += math.log(total[row])

    return kernels.compiled(attend, fast=FAST)
