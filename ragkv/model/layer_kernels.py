"""GEMM kernels for linear layers, and RMSNorm, on a CPU, compiled by numba for this processor.

A decode step multiplies every weight by a few rows, so its time is that of reading the weights. torch's libraries
repack them first, need a copy in a format of their own, or read them at half the memory bandwidth. `product` reads a
row-major matrix `(out_features, in_features)` in place, in its stored dtype. For a single row it reads the weights in
memory order, which suits the hardware prefetcher best; for more rows it prefetches in software. It is a blocked GEMM
(Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008) whose accumulators, a few outputs by
a few rows, stay in registers. Both matrices are contiguous along the sum, so neither is packed, and hundreds of rows
take no longer than in torch's libraries.

A row's result never depends on the other rows: every sum is made in the same order.

RMSNorm is eight torch operations in transformers, each with its own intermediate tensor; here it is one kernel.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from ragkv.util import kernels
from ragkv.util.kernels import (
    FAST,
    FLOAT,
    INT,
    LITERAL,
    LONG,
    SIZES,
    BFloat,
    address,
    argument,
    claimed,
    emits,
    float_of,
    floats,
    load,
    narrowed,
    octets,
    pointer_to,
    reals,
    widened,
)

OUT, ROWS, WEIGHTS, BIAS, IN_FEATURES, OUT_FEATURES, COUNT, SCALES, ZEROS, STEPS = range(
    kernels.ARGUMENTS, kernels.ARGUMENTS + 10
)
"""The arguments of `product`: addresses of the output `(rows, out_features)`, the input `(rows, in_features)`, the
weights and the bias (0: none); the sizes; for int8 weights the address of the output scales; and for uint8 rows also
the addresses of each output's correction for the offset of 128 and of the row scales.
"""
REST = 1 / 254
"""An input row is stored as two uint8 rows, both offset by 128; the second is in units of REST times the first's."""
_LINE = 64
_TILE_BYTES, _BLOCK_BYTES = 1 << 17, 1 << 18
"""Bytes of weights and rows that a tile reads before it moves on along the sum; and bytes of input rows that share a
part of the weights before the next rows do.
"""
_MOST_ROWS = 96
_GROUP = 256
"""With more than `_FEW` rows, this many tiles of weights are summed part by part."""
_FEW = 12
_AHEAD = 8
"""Prefetch distance of the weights, in outputs."""
_FUSED = ("contract",)  # not "reassoc": the order of a sum is the same in all tiles

if "avx2" not in kernels.features():
    raise ImportError("on other processors than x86 torch's own kernels are faster, as far as is known")


class _Tile:
    """A register tile for these dtypes of weights and rows: accumulators for `outs` outputs by up to `rows` rows.

    Rows are float32; bfloat16 beside bfloat16 weights; or uint8, two for each row, beside int8 weights.
    """

    def __init__(self, weight: str, row: str) -> None:
        wide = "avx512f" in kernels.features()
        self.weight, self.row, self.out = weight, row, "bfloat16" if row == "bfloat16" else "float32"
        self.sums = floats(16 if wide else 8)
        self.outs, self.rows = (4, 6) if wide else (2, 6)
        self.parts = 1
        if row == "uint8":
            self.outs, self.rows, self.parts, self.sums = 4, 3, 2, ir.VectorType(INT, 16)
        self.step = _LINE // SIZES[weight]
        """Weights of one output that are loaded at a time."""
        each = self.outs * SIZES[weight] + self.rows * self.parts * SIZES[row]
        self.most = _TILE_BYTES // each // _LINE * _LINE
        """Length of the part of a sum that is computed at a time."""


class _Code:
    """Generates code that multiplies `count` rows by a tile's weights, and writes the result or accumulates it in the
    totals `(count, parts, outs)`.

    `output` and `row` are the tile's first ones; `data` is the address of the kernel's arguments.
    """

    def __init__(self, b: Any, tile: _Tile, data: Any, output: Any, row: Any, count: int) -> None:
        self._b, self._tile, self._output, self._row, self._count = b, tile, output, row, count
        self._given = {place: load(b, pointer_to(b, data, 8 * place), LONG, 8) for place in range(OUT, STEPS + 1)}
        self._whole = tile.row == "uint8"

    def write(self, totals: Any, first: Any, last: Any, few: Any) -> None:
        """Process the products `first` to `last` of each sum."""
        b, tile = self._b, self._tile
        weights = [
            self._offset(WEIGHTS, b.add(self._output, LONG(i)), IN_FEATURES, tile.weight) for i in range(tile.outs)
        ]
        begin = b.mul(self._row, LONG(tile.parts))
        rows = [
            self._offset(ROWS, b.add(begin, LONG(i)), IN_FEATURES, tile.row) for i in range(self._count * tile.parts)
        ]
        if self._count > 1:
            sums = self._products(weights, rows, first, last, few)
        else:  # a single row is bound by memory: read the weights in memory order
            apart = [self._products([each], rows, first, last, None) for each in weights]
            sums = [[vector for (vector,) in each] for each in zip(*apart, strict=True)]
        self._add([kernels.summed(b, vectors) for vectors in sums], totals, first, last)

    def _offset(self, start: int, index: Any, length: int | None, kind: str) -> Any:
        """Offset in bytes of a row in a matrix whose rows have `length` numbers of this kind."""
        b, size = self._b, LONG(SIZES[kind])
        wide = size if length is None else b.mul(self._given[length], size)
        return b.add(self._given[start], b.mul(index, wide))

    def _products(self, weights: list[Any], rows: list[Any], first: Any, last: Any, few: Any) -> list[list[Any]]:
        """The accumulators of each row with each output's weights, as vectors."""
        b, tile = self._b, self._tile
        size, wide = LONG(SIZES[tile.weight]), b.mul(self._given[IN_FEATURES], LONG(SIZES[tile.weight]))
        before, body, after = b.block, b.append_basic_block(), b.append_basic_block()
        ahead, apart, faster = b.mul(wide, LONG(_AHEAD)), wide, LONG(1)
        if few is not None:  # prefetch in memory order too, if that is the order of use
            apart, faster = b.select(few, LONG(_LINE), wide), b.select(few, LONG(len(weights)), faster)
        elif not self._whole:  # else access is sequential, which the hardware prefetcher serves up to a third faster
            alone = b.and_(b.icmp_signed("==", first, LONG(0)), b.icmp_signed("==", last, self._given[IN_FEATURES]))
            ahead = b.select(alone, LONG(0), ahead)
        fetched = b.add(weights[0], ahead)
        b.branch(body)
        b.position_at_end(body)
        i = b.phi(LONG)
        sums = [[b.phi(tile.sums) for _ in weights] for _ in rows]
        offset, along = b.mul(i, size), b.mul(i, LONG(SIZES[tile.row]))
        for line in range(len(weights)):
            kernels.prefetch(b, b.add(b.add(fetched, b.mul(offset, faster)), b.mul(apart, LONG(line))))
        more = self._added(sums, [b.add(each, offset) for each in weights], [b.add(each, along) for each in rows])
        following, nothing = b.add(i, LONG(tile.step)), ir.Constant(tile.sums, [0] * tile.sums.count)
        for phi, start, new in [(i, first, following), *((phi, nothing, new) for phi, new in _pairs(sums, more))]:
            phi.add_incoming(start, before)
            phi.add_incoming(new, body)
        b.cbranch(b.icmp_signed("<", following, last), body, after)
        b.position_at_end(after)
        return more

    def _added(self, sums: list[list[Any]], weights: list[Any], rows: list[Any]) -> list[list[Any]]:
        """The accumulators after one more step, with the weights and rows at these addresses."""
        b, tile = self._b, self._tile
        if tile.row != "float32":
            kind = ir.VectorType(BFloat(), tile.step) if tile.row == "bfloat16" else tile.sums
            name = "avx512bf16.dpbf16ps" if tile.row == "bfloat16" else "avx512.vpdpbusd"
            dot = kernels.function(b, f"llvm.x86.{name}.512", tile.sums, tile.sums, kind, kind)
            these, those = ([load(b, place, kind) for place in places] for places in (weights, rows))
            return [
                [b.call(dot, [total, row, weight]) for total, weight in zip(some, these, strict=True)]
                for some, row in zip(sums, those, strict=True)
            ]
        width = tile.sums.count
        for i in range(0, tile.step, width):
            these = [widened(b, pointer_to(b, place, i * SIZES[tile.weight]), tile.weight, width) for place in weights]
            those = [widened(b, pointer_to(b, place, i * SIZES[tile.row]), tile.row, width) for place in rows]
            sums = [
                [
                    self._plus(total, b.fmul(weight, row, flags=_FUSED))
                    for total, weight in zip(some, these, strict=True)
                ]
                for some, row in zip(sums, those, strict=True)
            ]
        return sums

    def _plus(self, one: Any, other: Any) -> Any:
        return self._b.add(one, other) if self._whole else self._b.fadd(one, other, flags=_FUSED)

    def _add(self, sums: list[Any], totals: Any, first: Any, last: Any) -> None:
        """Accumulate in the totals, unless this is the first part, and write the results if it is the last."""
        b, places = self._b, [pointer_to(self._b, totals, 4 * self._tile.outs * index) for index in range(len(sums))]
        before, later, both = b.block, b.append_basic_block(), b.append_basic_block()
        b.cbranch(b.icmp_signed("==", first, LONG(0)), both, later)
        b.position_at_end(later)
        more = [self._plus(load(b, place, total.type, 4), total) for place, total in zip(places, sums, strict=True)]
        b.branch(both)
        b.position_at_end(both)
        result = [b.phi(total.type) for total in sums]
        for phi, one, other in zip(result, sums, more, strict=True):
            phi.add_incoming(one, before)
            phi.add_incoming(other, later)
        with b.if_else(b.icmp_signed("==", last, self._given[IN_FEATURES])) as (then, otherwise):
            with then:
                self._finish(result)
            with otherwise:
                for place, total in zip(places, result, strict=True):
                    kernels.store(b, total, place, 4)

    def _finish(self, sums: list[Any]) -> None:
        """Write the results."""
        b, tile, bias = self._b, self._tile, self._bias()
        real = bias.type
        scales = self._vector(SCALES, real) if tile.weight == "int8" else None
        zeros = self._vector(ZEROS, sums[0].type) if self._whole else None
        for i in range(self._count):
            row, (result, *others) = b.add(self._row, LONG(i)), sums[i * tile.parts : (i + 1) * tile.parts]
            if self._whole:
                one, rest = (b.sitofp(b.sub(each, zeros), real) for each in (result, *others))
                step = load(b, self._offset(STEPS, row, None, "float32"), FLOAT, 4)
                result = b.fadd(one, b.fmul(rest, ir.Constant(real, [REST] * tile.outs)))
                result = b.fmul(result, kernels.repeated(b, step, tile.outs))
            if scales is not None:
                result = b.fmul(result, scales)
            result = kernels.narrowed(b, b.fadd(result, bias), tile.out)
            place = self._offset(OUT, row, OUT_FEATURES, tile.out)
            kernels.store(b, result, b.add(place, b.mul(self._output, LONG(SIZES[tile.out]))))

    def _vector(self, start: int, kind: Any) -> Any:
        """Load a vector of four-byte numbers for the tile's outputs."""
        return load(self._b, self._offset(start, self._output, None, "float32"), kind, 4)

    def _bias(self) -> Any:
        """The bias of the tile's outputs, in float32."""
        b, tile = self._b, self._tile
        nothing, before = ir.Constant(floats(tile.outs), [0.0] * tile.outs), b.block
        with b.if_then(b.icmp_signed("!=", self._given[BIAS], LONG(0))):
            found, inside = widened(b, self._offset(BIAS, self._output, None, tile.out), tile.out, tile.outs), b.block
        bias = b.phi(nothing.type)
        bias.add_incoming(nothing, before)
        bias.add_incoming(found, inside)
        return bias


def _pairs(one: list[list[Any]], other: list[list[Any]]) -> list[tuple[Any, Any]]:
    flat = ([each for some in vectors for each in some] for vectors in (one, other))
    return list(zip(*flat, strict=True))


@emits(types.void, *[types.int64] * 7, types.boolean, LITERAL, LITERAL)
def _write(
    b: Any,
    data: Any,
    output: Any,
    row: Any,
    count: Any,
    totals: Any,
    first: Any,
    last: Any,
    few: Any,
    weight_kind: str,
    row_kind: str,
) -> None:
    """`_Code.write`, for 1 to `_Tile.rows` rows."""
    tile = _Tile(weight_kind, row_kind)
    end = b.append_basic_block()
    switch = b.switch(count, end)
    for rows in range(1, tile.rows + 1):
        block = b.append_basic_block()
        switch.add_case(LONG(rows), block)
        b.position_at_end(block)
        _Code(b, tile, data, output, row, rows).write(totals, first, last, few)
        b.branch(end)
    b.position_at_end(end)


@functools.cache
def tile_outputs(weight: str, row: str) -> int:
    """Outputs per work unit of the kernel."""
    return _Tile(weight, row).outs


@kernels.once
def product(weight: str, row: str) -> Any:
    """The kernel (`ragkv.util.kernels.run`) for weights and rows of these kinds: "bfloat16", "float16", "float32" and
    "int8" weights with float32 rows, "bfloat16" weights and rows, and "int8" weights with "uint8" rows.

    `in_features` is a multiple of the weights in 64 bytes.
    """
    tile = _Tile(weight, row)
    most, outs, longest = tile.rows, tile.outs, tile.most
    size, of_row = tile.parts * SIZES[row], 4 * tile.parts * outs

    def kernel(data):
        k, n, count = argument(data, IN_FEATURES), argument(data, OUT_FEATURES), argument(data, COUNT)
        units, chunk = argument(data, kernels.UNITS), argument(data, kernels.CHUNK)
        pieces = (k + longest - 1) // longest
        piece = (k // pieces + _LINE - 1) // _LINE * _LINE
        block = min(count, max(most, min(_MOST_ROWS, _BLOCK_BYTES // (piece * size))))
        few = count <= _FEW
        group = 1 if few else min(_GROUP, chunk)
        memory = np.empty(group * block * of_row, np.uint8)
        while True:
            claim = claimed(data)
            if claim >= units:
                return
            end = min(claim + chunk, units)
            for begin in range(claim, end, group):
                for start in range(0, count, block):
                    rows = min(block, count - start)
                    tiles = (rows + most - 1) // most
                    for first in range(0, k, piece):
                        last = min(first + piece, k)
                        for unit in range(begin, min(begin + group, end)):
                            output = min(unit * outs, n - outs)
                            for index in range(tiles):
                                from_row = rows * index // tiles
                                some = rows * (index + 1) // tiles - from_row
                                into = address(memory) + ((unit - begin) * block + from_row) * of_row
                                _write(data, output, start + from_row, some, into, first, last, few, weight, row)

    return kernels.compiled(kernel)


STATES, STATE_STEPS, BOTH, WIDTH = range(kernels.ARGUMENTS, kernels.ARGUMENTS + 4)
"""The arguments of `quantise`: addresses of states `(rows, in_features)`, their scales and what it fills; the size."""


@kernels.once
def quantise() -> Any:
    """The kernel that splits each float32 row into two uint8 rows."""

    def kernel(data):
        states, steps = reals(argument(data, STATES)), reals(argument(data, STATE_STEPS))
        both, width = octets(argument(data, BOTH)), argument(data, WIDTH)
        units, chunk = argument(data, kernels.UNITS), argument(data, kernels.CHUNK)
        while True:
            first = claimed(data)
            if first >= units:
                return
            for row in range(first, min(first + chunk, units)):
                scale, place = np.float32(1) / steps[row], 2 * row * width
                for i in range(width):
                    number = states[row * width + i] * scale
                    whole = np.rint(number)
                    both[place + i] = np.uint8(np.int32(whole) + 128)
                    both[place + width + i] = np.uint8(np.int32(np.rint((number - whole) * np.float32(1 / REST))) + 128)

    return kernels.compiled(kernel)


NORM_STATES, NORM_WEIGHT, NORM_OUT, NORM_WIDTH, NORM_EPSILON = range(kernels.ARGUMENTS, kernels.ARGUMENTS + 5)
"""The kernel's arguments: addresses of states `(rows, width)`, weights `(width,)` and the result; the width, a multiple
of `PIECE`; and the bits of epsilon in float32.
"""
PIECE = 16
FORMS = ("rounded", "whole", "one more")
"""How the normalised states are multiplied: by the weights after rounding to the states' dtype (Llama), by the weights
before rounding (OLMo 2), or by one plus the weights before rounding (Gemma).
"""


@emits(types.void, *[types.int64] * 4, types.float32, LITERAL, LITERAL)
def _normalise(b: Any, states: Any, weight: Any, out: Any, width: Any, epsilon: Any, kind: str, form: str) -> None:
    """Write x / sqrt(mean(x²) + epsilon) · weight for a row."""
    vector, size = floats(PIECE), LONG(SIZES[kind])
    total = cgutils.alloca_once_value(b, ir.Constant(vector, [0.0] * PIECE))
    with cgutils.for_range_slice(b, LONG(0), width, LONG(PIECE), LONG) as (i, _):
        numbers = widened(b, b.add(states, b.mul(i, size)), kind, PIECE)
        b.store(b.fadd(b.load(total), b.fmul(numbers, numbers, flags=FAST), flags=FAST), total)
    reduce = kernels.function(b, f"llvm.vector.reduce.fadd.v{PIECE}f32", FLOAT, FLOAT, vector)
    squares = b.call(reduce, [ir.Constant(FLOAT, 0.0), b.load(total)], fastmath=FAST)
    root = kernels.function(b, "llvm.sqrt.f32", FLOAT, FLOAT)
    mean = b.fdiv(squares, b.sitofp(width, FLOAT))
    unit = ir.Constant(FLOAT, 1.0)
    scale = kernels.repeated(b, b.fdiv(unit, b.call(root, [b.fadd(mean, epsilon)])), PIECE)
    with cgutils.for_range_slice(b, LONG(0), width, LONG(PIECE), LONG) as (i, _):
        along = b.mul(i, size)
        numbers = b.fmul(widened(b, b.add(states, along), kind, PIECE), scale)
        if form == "rounded" and kind == "bfloat16":
            numbers = b.fpext(narrowed(b, numbers, kind), vector)
        factors = widened(b, b.add(weight, along), kind, PIECE)
        if form == "one more":
            factors = b.fadd(factors, kernels.repeated(b, unit, PIECE))
        kernels.store(b, narrowed(b, b.fmul(numbers, factors), kind), b.add(out, along))


@kernels.once
def rms_norm(kind: str, form: str) -> Any:
    """The kernel (`ragkv.util.kernels.run`) for "bfloat16" or "float32" states and weights; its work unit is a row."""
    size = SIZES[kind]

    def kernel(data):
        states, weight, out = argument(data, NORM_STATES), argument(data, NORM_WEIGHT), argument(data, NORM_OUT)
        width, epsilon = argument(data, NORM_WIDTH), float_of(np.int32(argument(data, NORM_EPSILON)))
        units, chunk = argument(data, kernels.UNITS), argument(data, kernels.CHUNK)
        while True:
            first = claimed(data)
            if first >= units:
                return
            for row in range(first, min(first + chunk, units)):
                place = row * width * size
                _normalise(states + place, weight, out + place, width, epsilon, kind, form)

    return kernels.compiled(kernel)
