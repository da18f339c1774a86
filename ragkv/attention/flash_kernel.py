"""Attention of many queries on a processor with AVX-512: a kernel that numba compiles for this processor.

torch's kernel reaches a third of such a processor's peak in bfloat16, so most of a question's time went into attention
over its chunks. This is FlashAttention (Dao et al., 2022): it computes the scores of a block of keys, keeps a running
maximum and sum for each query, and adds the weighted values. The keys of a block are transposed once for all queries
that read them, so that one instruction multiplies an element of a query by 16 keys.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import math
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
    SIZES,
    address,
    argument,
    claimed,
    emits,
    float_of,
    floats,
    integers,
    load,
    narrowed,
    pointer_to,
    reals,
)

TABLE, ROW, PARTS, TILES, OUT, LSE, COS, SIN, PARTNERS = range(kernels.ARGUMENTS, kernels.ARGUMENTS + 9)
HEADS, GROUP, HEAD_STEP, TOKEN_STEP, OUT_HEAD, OUT_TOKEN = range(PARTNERS + 1, PARTNERS + 7)
QUERY, INTO, COUNT, START, END, CAUSAL, SCALE, COLUMNS = range(8)
"""The kernel's arguments, and the columns of its parts (`attention`)."""
BLOCK = 64
"""Keys per block."""
QUERIES_AT_A_TIME = 192
_BAND = 24
_ROWS, _WIDE = 6, 4
"""The register tile: queries, and vectors of 16 accumulators for each."""
_LINE = 64
_LOG2_E = 1 / math.log(2)

if "avx512f" not in kernels.features():
    raise ImportError("the processor has no AVX-512")


def _sum(b: Any, kind: str, total: Any, factor: Any, vector: Any) -> Any:
    """The accumulator after multiplying an element of a query, or two of them in 32 bits, by a vector."""
    if kind == "float32":
        return b.fadd(total, b.fmul(factor, vector, flags=FAST), flags=FAST)
    wide = ir.VectorType(kernels.BFloat(), 32)
    dot = kernels.function(b, "llvm.x86.avx512bf16.dpbf16ps.512", total.type, total.type, wide, wide)
    return b.call(dot, [total, b.bitcast(factor, wide), b.bitcast(vector, wide)])


@emits(types.void, *[types.int64] * 9, LITERAL, LITERAL)
def _multiply(
    b: Any,
    out: Any,
    out_step: Any,
    left: Any,
    left_step: Any,
    right: Any,
    right_step: Any,
    steps: Any,
    count: Any,
    fresh: Any,
    vectors: int,
    kind: str,
) -> None:
    """`out` `(count, 16 * vectors)` = or, unless `fresh`, += `left` `(count, steps)` · `right` `(steps, 16 * vectors)`.
    A step of bfloat16 is two numbers. There are 1 to `_ROWS` rows; strides are in bytes.
    """
    number = FLOAT if kind == "float32" else INT
    vector = ir.VectorType(number, 16)
    end = b.append_basic_block()
    switch = b.switch(count, end)
    for rows in range(1, _ROWS + 1):
        block = b.append_basic_block()
        switch.add_case(LONG(rows), block)
        b.position_at_end(block)
        outs = [b.add(out, b.mul(out_step, LONG(row))) for row in range(rows)]
        lefts = [b.add(left, b.mul(left_step, LONG(row))) for row in range(rows)]
        nothing = ir.Constant(floats(16), [0.0] * 16)
        is_fresh = b.icmp_signed("!=", fresh, LONG(0))
        starts = [
            b.select(is_fresh, nothing, load(b, pointer_to(b, place, _LINE * i), floats(16), 4))
            for place in outs
            for i in range(vectors)
        ]
        before, body, after = b.block, b.append_basic_block(), b.append_basic_block()
        b.branch(body)
        b.position_at_end(body)
        i = b.phi(LONG)
        sums = [b.phi(floats(16)) for _ in starts]
        row_of = b.add(right, b.mul(i, right_step))
        those = [load(b, pointer_to(b, row_of, _LINE * j), vector, 4) for j in range(vectors)]
        more = []
        for row, place in enumerate(lefts):
            one = kernels.repeated(b, load(b, b.add(place, b.mul(i, LONG(4))), number, 4), 16)
            more += [_sum(b, kind, sums[row * vectors + j], one, those[j]) for j in range(vectors)]
        following = b.add(i, LONG(1))
        for phi, start, new in [(i, LONG(0), following), *zip(sums, starts, more, strict=True)]:
            phi.add_incoming(start, before)
            phi.add_incoming(new, body)
        b.cbranch(b.icmp_signed("<", following, steps), body, after)
        b.position_at_end(after)
        for index, total in enumerate(more):
            kernels.store(b, total, pointer_to(b, outs[index // vectors], _LINE * (index % vectors)), 4)
        b.branch(end)
    b.position_at_end(end)


@emits(types.void, *[types.int64] * 4)
def _transpose(b: Any, out: Any, out_step: Any, source: Any, step: Any) -> None:
    """Transpose a 16 x 16 matrix of 32-bit numbers."""
    words = ir.VectorType(INT, 16)
    rows = [load(b, b.add(source, b.mul(step, LONG(i))), words, 2) for i in range(16)]
    for s in (8, 4, 2, 1):  # swap the blocks of s x s that are not on the diagonal
        for i in (i for i in range(16) if not i & s):
            first, other = rows[i], rows[i + s]
            upper = [16 + lane - s if lane & s else lane for lane in range(16)]
            lower = [16 + lane if lane & s else lane + s for lane in range(16)]
            rows[i], rows[i + s] = (
                b.shuffle_vector(first, other, ir.Constant(words, places)) for places in (upper, lower)
            )
    for i, row in enumerate(rows):
        kernels.store(b, row, b.add(out, b.mul(out_step, LONG(i))), 4)


@emits(types.void, *[types.int64] * 3)
def _pair(b: Any, out: Any, one: Any, other: Any) -> None:
    """Interleave two rows of 32 bfloat16 numbers."""
    rows = [load(b, place, ir.VectorType(ir.IntType(16), 32), 2) for place in (one, other)]
    for half in (0, 16):
        mixed = [half + i // 2 + 32 * (i % 2) for i in range(32)]
        pairs = b.shuffle_vector(*rows, ir.Constant(ir.VectorType(INT, 32), mixed))
        kernels.store(b, pairs, pointer_to(b, out, 4 * half), 2)


@emits(types.void, types.int64, types.int64, LITERAL)
def _store(b: Any, out: Any, source: Any, kind: str) -> None:
    """Write 16 float32 numbers as this kind."""
    kernels.store(b, narrowed(b, load(b, source, floats(16), 4), kind), out, 2)


@emits(types.void, types.int64, types.int64, LITERAL)
def _line(b: Any, out: Any, source: Any, kind: str) -> None:
    """Write 64 bytes: a copy of the source, or 16 numbers of its `kind` as float32; zeros if the source is 0."""
    kernels.store(b, ir.Constant(floats(16), [0.0] * 16), out)
    with b.if_then(b.icmp_signed("!=", source, LONG(0))):
        kernels.store(b, kernels.widened(b, source, kind, 16), out)


@emits(types.void, *[types.int64] * 3, LITERAL)
def _unpack(b: Any, out: Any, source: Any, scale: Any, kind: str) -> None:
    """Write 64 bytes of numbers of a kind, dequantised from int8 with their scale; all arguments are addresses."""
    count = _LINE // SIZES[kind]
    largest = b.extract_element(kernels.widened(b, scale, "bfloat16", 1), INT(0))
    one = b.fmul(largest, FLOAT(1 / MOST))
    numbers = b.fmul(kernels.widened(b, source, "int8", count), kernels.repeated(b, one, count))
    kernels.store(b, narrowed(b, numbers, kind), out, 2)


@numba.njit
def _copy(out, source, step, count, row, code, half):
    """Copy `count` rows to the beginning of a block, and clear the rest. `code` is the table's: 1 for float16, which is
    widened; 2 for int8, which becomes bfloat16 with `half` and else float32.
    """
    for i in range(BLOCK):
        for word in range(0, row, _LINE):
            if code == 2 and i < count:
                first, to = source + i * step, out + i * row + word
                if half:
                    _unpack(to, first + word // 2, first + row // 2, "bfloat16")
                else:
                    _unpack(to, first + word // 4, first + row // 4, "float32")
            elif code == 1:
                _line(out + i * row + word, source + i * step + word // 2 if i < count else 0, "float16")
            else:
                _line(out + i * row + word, source + i * step + word if i < count else 0, "float32")


@emits(types.void, *[types.int64] * 5, LITERAL)
def _rotate(b: Any, out: Any, query: Any, other: Any, cos: Any, sin: Any, kind: str) -> None:
    """Write 16 numbers cos·query + sin·other as this kind; all arguments are addresses of float32."""
    query, other, cos, sin = (load(b, place, floats(16), 4) for place in (query, other, cos, sin))
    rotated = b.fadd(b.fmul(query, cos, flags=FAST), b.fmul(other, sin, flags=FAST), flags=FAST)
    kernels.store(b, narrowed(b, rotated, kind), out, 2)


@emits(types.float32, types.int64, LITERAL)
def _number(b: Any, place: Any, kind: str) -> Any:
    """Load a number of this kind from an address."""
    return b.extract_element(kernels.widened(b, place, kind, 1), INT(0))


def _power(b: Any, y: Any) -> Any:
    """2^y of 16 numbers y <= 0, at least 2^-126, as in `ragkv.attention.decode_kernel.exponential`."""
    vector = y.type

    def constant(number: float) -> Any:
        return ir.Constant(vector, [number] * 16)

    y = b.select(b.fcmp_ordered("<", y, constant(-126.0)), constant(-126.0), y)  # keeps NaN
    whole = b.call(kernels.function(b, "llvm.floor.v16f32", vector, vector), [y])
    part, power = b.fsub(y, whole), constant(POLYNOMIAL[0])
    for each in POLYNOMIAL[1:]:
        power = b.fadd(b.fmul(power, part, flags=FAST), constant(each), flags=FAST)
    name = "llvm.x86.avx512.mask.scalef.ps.512"
    scaled = kernels.function(b, name, vector, vector, vector, vector, ir.IntType(16), INT)
    return b.call(scaled, [power, whole, power, ir.IntType(16)(-1), INT(4)])  # power * 2^whole, of all 16


@emits(types.void, *[types.int64] * 6, types.float32, LITERAL, LITERAL)
def _weigh(
    b: Any,
    weights: Any,
    scores: Any,
    mixed: Any,
    best: Any,
    total: Any,
    visible: Any,
    scale: Any,
    width: int,
    kind: str,
) -> None:
    """Write the weights 2^(scale * score - best) of a query's block, 0 for keys that are not among the 64 bits
    `visible`. If `best` grows, which is likely in the first blocks only, rescale the running sums `(16,)` and the
    accumulated values `(width,)`. All other arguments are addresses.
    """
    words, vector, bits = ir.VectorType(INT, 16), floats(16), ir.IntType(16)
    scales, visible_scores, masks = kernels.repeated(b, scale, 16), [], []
    for start in range(0, BLOCK, 16):
        masks.append(b.bitcast(b.trunc(b.lshr(visible, LONG(start)), bits), ir.VectorType(ir.IntType(1), 16)))
        score = load(b, pointer_to(b, scores, 4 * start), vector, 4)
        visible_scores.append(b.select(masks[-1], score, ir.Constant(vector, [-3e38] * 16)))
    largest = visible_scores[0]
    for item in visible_scores[1:]:
        largest = b.select(b.fcmp_ordered(">", largest, item), largest, item)
    before, nothing = kernels.repeated(b, load(b, best, FLOAT, 4), 16), ir.Constant(vector, [0.0] * 16)
    largest = b.fmul(largest, scales)
    grows, outside = b.bitcast(b.fcmp_ordered(">", largest, before), bits), b.block
    with b.if_then(b.icmp_signed("!=", grows, bits(0))):
        for half in (8, 4, 2, 1):
            places = ir.Constant(words, [(lane + half) % 16 for lane in range(16)])
            other = b.shuffle_vector(largest, largest, places)
            largest = b.select(b.fcmp_ordered(">", largest, other), largest, other)
        kernels.store(b, b.extract_element(largest, INT(0)), best, 4)
        factor = _power(b, b.fsub(before, largest))
        for place in (total, *(pointer_to(b, mixed, 4 * start) for start in range(0, width, 16))):
            kernels.store(b, b.fmul(load(b, place, vector, 4), factor), place, 4)
        inside = b.block
    top = b.phi(vector)
    top.add_incoming(before, outside)
    top.add_incoming(largest, inside)
    results = [
        b.select(mask, _power(b, b.fsub(b.fmul(item, scales, flags=FAST), top, flags=FAST)), nothing)
        for mask, item in zip(masks, visible_scores, strict=True)
    ]
    added = load(b, total, vector, 4)
    for item in results:
        added = b.fadd(added, item)
    kernels.store(b, added, total, 4)
    for start, item in zip(range(0, BLOCK, 16), results, strict=True):
        kernels.store(b, narrowed(b, item, kind), pointer_to(b, weights, SIZES[kind] * start), 2)


@kernels.once
def attention(kind: str, width: int) -> Any:
    """The kernel for heads of `width` numbers of a kind, "bfloat16" or "float32".

    A work unit is a part, a key head (with the GROUP query heads that share it), and one of the TILES of its tokens'
    queries, each of at most `QUERIES_AT_A_TIME`.

    A part, a row of PARTS `(parts, COLUMNS)` in int64, is COUNT adjacent tokens that read the same keys. QUERY is the
    address of the first one's query, INTO its row in the output, and they read the rows START to END of the table. If
    the part is CAUSAL, the keys of its first table row end with those of the tokens themselves, and no token sees later
    ones. SCALE is the bits of a float32. Heads and tokens are HEAD_STEP and TOKEN_STEP bytes apart in the queries, and
    OUT_HEAD and OUT_TOKEN rows in the output: a row of OUT is `width` numbers of the same kind, a row of LSE a float32.

    The table is that of `ragkv.attention.in_place`, whose rows are ROW bytes apart; its rotations are COS, SIN and
    PARTNERS. Keys and values may be int8 with a scale and, for a kernel of float32, float16.
    """
    size, half = SIZES[kind], kind == "bfloat16"
    row, most, vectors = width * size, QUERIES_AT_A_TIME, math.gcd(width // 16, _WIDE)

    def kernel(data):
        units, chunk, table = argument(data, kernels.UNITS), argument(data, kernels.CHUNK), argument(data, TABLE)
        heads, group, tiles = argument(data, HEADS), argument(data, GROUP), argument(data, TILES)
        head_step, token_step = argument(data, HEAD_STEP), argument(data, TOKEN_STEP)
        cos, sin, partners = argument(data, COS), argument(data, SIN), integers(argument(data, PARTNERS))
        lse = reals(argument(data, LSE))
        scores, mixed = np.empty((_BAND, BLOCK), np.float32), np.empty((most, width), np.float32)
        weights, rotated = np.empty((_BAND, BLOCK * size), np.uint8), np.empty((most, row), np.uint8)
        wide, others = np.empty((most, width), np.float32), np.empty((most, width), np.float32)
        best, total = np.empty(most, np.float32), np.empty((most, 16), np.float32)
        laid_out, paired = np.empty(BLOCK * row, np.uint8), np.empty(BLOCK * row, np.uint8)
        copied_keys, copied_values = np.zeros(BLOCK * row, np.uint8), np.zeros(BLOCK * row, np.uint8)
        places, into = np.empty(most, np.int64), np.empty(most, np.int64)
        while True:
            claim = claimed(data)
            if claim >= units:
                return
            for unit in range(claim, min(claim + chunk, units)):
                part = integers(argument(data, PARTS) + 8 * COLUMNS * (unit // (heads * tiles)))
                head, index, n = unit // tiles % heads, unit % tiles, part[COUNT]
                begin, end = n * group * index // tiles, n * group * (index + 1) // tiles
                rows = end - begin
                if rows == 0:
                    continue
                early, late = begin // group, (end - 1) // group
                scale = float_of(np.int32(part[SCALE])) * np.float32(_LOG2_E)
                s, p, o, kt, vp = address(scores), address(weights), address(mixed), address(laid_out), address(paired)
                bests, totals, queries = address(best), address(total), address(rotated)
                w, other = address(wide), address(others)
                for r in range(rows):
                    token, at_head = (begin + r) // group, head * group + (begin + r) % group
                    places[r] = part[QUERY] + token * token_step + at_head * head_step
                    into[r] = (part[INTO] + token) * argument(data, OUT_TOKEN) + at_head * argument(data, OUT_HEAD)
                    best[r], total[r] = -np.inf, 0
                    for i in range(width):
                        mixed[r, i] = 0
                        if cos:
                            wide[r, i] = _number(places[r] + i * size, kind)
                            others[r, i] = _number(places[r] + partners[i] * size, kind)
                was = -2
                for segment in range(part[START], part[END]):
                    found = integers(table + segment * argument(data, ROW))
                    key, value = found[0] + head * found[3], found[1] + head * found[5]
                    keys, key_step, value_step, rotation, unseen = found[2], found[4], found[6], found[7], found[9]
                    code = found[8]
                    if rotation != was:
                        was = rotation
                        for r in range(rows):
                            if rotation < 0:
                                for word in range(0, row, _LINE):
                                    _line(queries + r * row + word, places[r] + word, "float32")
                                continue
                            for i in range(0, width, 16):
                                _rotate(
                                    queries + r * row + i * size,
                                    w + (r * width + i) * 4,
                                    other + (r * width + i) * 4,
                                    cos + (rotation * width + i) * 4,
                                    sin + (rotation * width + i) * 4,
                                    kind,
                                )
                    causal = part[CAUSAL] and segment == part[START]
                    until = keys - n + late + 1 if causal else keys
                    for start in range(max(0, unseen + early) // BLOCK * BLOCK, until, BLOCK):
                        count = min(BLOCK, keys - start)
                        k, k_step, v, v_step = key + start * key_step, key_step, value + start * value_step, value_step
                        if count < BLOCK or code:
                            _copy(address(copied_keys), k, k_step, count, row, code, half)
                            _copy(address(copied_values), v, v_step, count, row, code, half)
                            k, k_step, v, v_step = address(copied_keys), row, address(copied_values), row
                        for i in range(0, BLOCK, 16):
                            for word in range(0, row, _LINE):
                                _transpose(kt + word * BLOCK + i * 4, BLOCK * 4, k + i * k_step + word, k_step)
                        if half:
                            for i in range(0, BLOCK, 2):
                                for word in range(0, row, _LINE):
                                    _pair(vp + i * row + 2 * word, v + i * v_step + word, v + (i + 1) * v_step + word)
                            v, v_step = vp, 2 * row
                        for top in range(0, rows, _BAND):
                            band = min(_BAND, rows - top)
                            pieces = (band + _ROWS - 1) // _ROWS
                            for piece in range(pieces):
                                r = band * piece // pieces
                                some = band * (piece + 1) // pieces - r
                                _multiply(
                                    s + r * BLOCK * 4,
                                    BLOCK * 4,
                                    queries + (top + r) * row,
                                    row,
                                    kt,
                                    BLOCK * 4,
                                    row // 4,
                                    some,
                                    1,
                                    _WIDE,
                                    kind,
                                )
                            for r in range(band):
                                token = (begin + top + r) // group
                                first = unseen + token - start
                                last = min(count, keys - n + token + 1 - start) if causal else count
                                visible = (1 << last) - 1 if 0 <= last < BLOCK else -int(last > 0)
                                visible &= -1 << max(first, 0) if first < BLOCK else 0
                                _weigh(
                                    p + r * BLOCK * size,
                                    s + r * BLOCK * 4,
                                    o + (top + r) * width * 4,
                                    bests + (top + r) * 4,
                                    totals + (top + r) * _LINE,
                                    visible,
                                    scale,
                                    width,
                                    kind,
                                )
                            for piece in range(pieces):
                                r = band * piece // pieces
                                some = band * (piece + 1) // pieces - r
                                to, left = o + (top + r) * width * 4, p + r * BLOCK * size
                                for i in range(0, width, 16 * vectors):
                                    _multiply(
                                        to + i * 4,
                                        width * 4,
                                        left,
                                        BLOCK * size,
                                        v + i * 4,
                                        v_step,
                                        BLOCK * size // 4,
                                        some,
                                        0,
                                        vectors,
                                        kind,
                                    )
                for r in range(rows):
                    whole = total[r].sum()
                    if whole == 0:  # it has seen no key
                        best[r], whole = -np.inf, np.float32(1)
                    for i in range(width):
                        mixed[r, i] /= whole
                    for i in range(0, width, 16):
                        _store(argument(data, OUT) + into[r] * row + i * size, o + (r * width + i) * 4, kind)
                    lse[into[r]] = best[r] / np.float32(_LOG2_E) + math.log(whole)

    return kernels.compiled(kernel, fast=FAST)
