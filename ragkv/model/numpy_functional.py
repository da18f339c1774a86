"""The functions of `torch.nn.functional` that a BERT needs, over arrays of float32: the embedding of one question does
not wait for the import of torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_ERF = np.array([1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592, 0], np.float32)
"""Abramowitz and Stegun, 7.1.26: its error is at most 1.5e-7."""


def linear(x: Array, weight: Array, bias: Array) -> Any:
    return x @ weight.T + bias


def layer_norm(x: Array, _: object, weight: Array, bias: Array, eps: float) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(eps)) * weight + bias


def gelu(x: Array) -> Any:
    z = np.abs(x) * np.float32(0.5**0.5)
    tail = np.polyval(_ERF, 1 / (1 + np.float32(0.3275911) * z)) * np.exp(-z * z)
    return 0.5 * x * (1 + np.sign(x) * (1 - tail))


def scaled_dot_product_attention(queries: Array, keys: Array, values: Array, attn_mask: Array | None) -> Any:
    scores = queries @ keys.swapaxes(-1, -2) * np.float32(queries.shape[-1] ** -0.5)
    if attn_mask is not None:
        scores = np.where(attn_mask, scores, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    return scores / scores.sum(-1, keepdims=True) @ values


def normalize(x: Array, dim: int) -> Any:
    return x / np.maximum(np.linalg.norm(x, axis=dim, keepdims=True), np.float32(1e-12))
