"""RMSNorm on a processor: a kernel that numba compiles for this processor.

transformers computes it by eight operations of torch, each over memory of its own.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ragkv.util import kernels
from ragkv.util.kernels import FAST, FLOAT, LONG, SIZES, argument, claimed, float_of, floats, narrowed, widened

STATES, WEIGHT, OUT, WIDTH, EPSILON = range(kernels.ARGUMENTS, kernels.ARGUMENTS + 5)
"""The kernel's arguments: addresses of states `(rows, width)`, weights `(width,)` and the result; the width, a multiple
of `PIECE`; and the bits of epsilon in float32.
"""
PIECE = 16
FORMS = ("rounded", "whole", "one more")
"""What multiplies the normalised states: weights after they were rounded to the states' kind (Llama), or before (OLMo
2); or one plus the weights, before (Gemma).
"""


@intrinsic(prefer_literal=True)
def _normalise(context: Any, states: Any, weight: Any, out: Any, width: Any, epsilon: Any, kind: Any, form: Any) -> Any:
    """Fill a row with x / sqrt(mean(x²) + epsilon) · weight."""
    name, how = kind.literal_value, form.literal_value

    def generate(_context: Any, b: Any, _signature: Any, arguments: Any) -> None:
        states, weight, out, width, epsilon = arguments[:5]
        vector, size = floats(PIECE), LONG(SIZES[name])
        total = cgutils.alloca_once_value(b, ir.Constant(vector, [0.0] * PIECE))
        with cgutils.for_range_slice(b, LONG(0), width, LONG(PIECE), LONG) as (i, _):
            numbers = widened(b, b.add(states, b.mul(i, size)), name, PIECE)
            b.store(b.fadd(b.load(total), b.fmul(numbers, numbers, flags=FAST), flags=FAST), total)
        reduce = kernels.function(b, f"llvm.vector.reduce.fadd.v{PIECE}f32", FLOAT, FLOAT, vector)
        squares = b.call(reduce, [ir.Constant(FLOAT, 0.0), b.load(total)], fastmath=FAST)
        root = kernels.function(b, "llvm.sqrt.f32", FLOAT, FLOAT)
        mean = b.fdiv(squares, b.sitofp(width, FLOAT))
        one = ir.Constant(FLOAT, 1.0)
        scale = kernels.repeated(b, b.fdiv(one, b.call(root, [b.fadd(mean, epsilon)])), PIECE)
        with cgutils.for_range_slice(b, LONG(0), width, LONG(PIECE), LONG) as (i, _):
            along = b.mul(i, size)
            numbers = b.fmul(widened(b, b.add(states, along), name, PIECE), scale)
            if how == "rounded" and name == "bfloat16":
                numbers = b.fpext(narrowed(b, numbers, name), vector)
            factors = widened(b, b.add(weight, along), name, PIECE)
            if how == "one more":
                factors = b.fadd(factors, kernels.repeated(b, one, PIECE))
            kernels.store(b, narrowed(b, b.fmul(numbers, factors), name), b.add(out, along))

    return types.void(states, weight, out, width, epsilon, kind, form), generate


@kernels.once
def rms_norm(kind: str, form: str) -> Any:
    """The kernel (`ragkv.util.kernels.run`) for "bfloat16" or "float32" states and weights; a unit is a row."""
    size = SIZES[kind]

    def kernel(data):
        states, weight, out = argument(data, STATES), argument(data, WEIGHT), argument(data, OUT)
        width, epsilon = argument(data, WIDTH), float_of(np.int32(argument(data, EPSILON)))
        units, chunk = argument(data, kernels.UNITS), argument(data, kernels.CHUNK)
        while True:
            first = claimed(data)
            if first >= units:
                return
            for row in range(first, min(first + chunk, units)):
                place = row * width * size
                _normalise(states + place, weight, out + place, width, epsilon, kind, form)

    return kernels.compiled(kernel)
