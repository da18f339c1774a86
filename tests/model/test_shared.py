"""Layers that read another layer's keys and values: these are kept once, and read by all of them."""

from __future__ import annotations

import pytest
import torch

from ragkv.attention.row import Row
from ragkv.attention.shape import LayerShape
from ragkv.attention.slab import Slabs
from ragkv.model.proof import check_model

SHARED = {4: 2, 5: 3, 6: 2, 7: 3}


@pytest.fixture(scope="module")
def model(make_model):
    return make_model("gemma3n")


def test_they_are_found_by_what_they_read(model, make_model):
    assert model.shared == SHARED
    assert make_model("llama").shared == {}


def test_a_second_proof_finds_the_same(model):
    check_model(model)
    assert model.shared == SHARED


def test_they_keep_nothing(model):
    [kv] = model.encode([[5, 6, 7]])
    assert kv.shape.layers == (LayerShape(2, 16, 16),) * 4 + (LayerShape(0, 0, 0),) * 4
    assert kv.nbytes == 3 * 4 * 2 * 32 * 4 == kv.shape.nbytes(3)
    assert [key.shape[1] for key in kv.keys] == [3] * 8


def test_an_encoding_ends_at_the_last_layer_that_keeps_anything(model):
    seen = []
    model.step([Row.for_kv((), position=0)], [[5, 6, 7]], seen=seen)
    assert [one.layer for one in seen] == [0, 1, 2, 3]


@pytest.mark.parametrize("slabs", [False, True])
def test_own_tokens_are_kept_once_wherever_they_lie(model, slabs):
    """Of a row of its own and of rows in one slab, read at once and token by token."""
    rows = [Row((), 0), Row((), 0)]
    if slabs:
        places = Slabs()
        for row in rows:
            row.own = places.place(8, 8, 2)
    ids = [[9, 8, 7, 6], [5, 6, 7]]
    model.step(rows, [each[:-1] for each in ids])
    found = model.step(rows, [each[-1:] for each in ids])
    for row, each, logits in zip(rows, ids, found, strict=True):
        whole = Row((), 0)
        torch.testing.assert_close(logits, model.step([whole], [each])[0], atol=1e-4, rtol=1e-4)
        made, expected = row.own.chunk_kv(), whole.own.chunk_kv()
        assert made.shape == expected.shape == model.kv_shape
        for a, b in zip(made.tensors, expected.tensors, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_transformers_cache_has_no_layers_for_them(model):
    [kv] = model.encode([[5, 6, 7]])
    cache = model.cache(kv)
    assert [layer.keys.shape[1] for layer in cache.layers] == [2] * 4
