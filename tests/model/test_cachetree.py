"""The form of a cache is found by trying, whatever class it is; one that cannot be told is refused."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from ragkv.errors import UnsupportedModelError
from ragkv.model.cachetree import CacheTree
from ragkv.model.packing import Packing

ROWS, HEADS, WIDTH = 1, 2, 3


@dataclass
class Layer:
    keys: torch.Tensor
    states: dict[int, torch.Tensor]
    seen: int
    size: int = 4
    flag: bool = True


@dataclass
class Cache:
    layers: list[Layer] = field(default_factory=list)


def cache(tokens: int, rows: int = 1, *, grown: int | None = None, state: int = 5, seen: int | None = None) -> Cache:
    """Two layers after `tokens` tokens."""
    grown = tokens if grown is None else grown
    return Cache(
        [
            Layer(
                keys=torch.arange(rows * HEADS * grown * WIDTH).float().reshape(rows, HEADS, grown, WIDTH) + layer,
                states={0: torch.full((rows, state), float(tokens + layer))},
                seen=tokens if seen is None else seen,
            )
            for layer in range(2)
        ]
    )


def learnt(**odd) -> CacheTree:
    return CacheTree.of((5, cache(5, **odd)), [(6, cache(6, **odd)), (9, cache(9, **odd))], cache(5, rows=2, **odd))


def test_what_grows_is_told_from_what_does_not():
    tree = learnt()
    assert [(leaf.name, leaf.rows, leaf.tokens) for leaf in tree.leaves] == [
        ("layers.0.keys", 0, 2),
        ("layers.0.states.0", 0, None),
        ("layers.1.keys", 0, 2),
        ("layers.1.states.0", 0, None),
    ]


def test_a_cache_is_made_again_from_its_tensors():
    tree = learnt()
    before = cache(7)
    made = tree.make(tree.read(before), 7)
    assert [layer.seen for layer in made.layers] == [7, 7]
    assert made.layers[1].keys is before.layers[1].keys
    assert made.layers[1].states[0] is before.layers[1].states[0]
    assert made.layers[0] is not before.layers[0]
    assert (made.layers[0].size, made.layers[0].flag) == (4, True)


def test_two_caches_of_one_tree_have_nothing_in_common():
    tree = learnt()
    first, second = (tree.make(tree.read(cache(n)), n) for n in (7, 8))
    first.layers[0].states[0] = torch.zeros(1)
    assert second.layers[0].states[0].shape == (1, 5)
    assert first.layers[0].seen == 7


@pytest.mark.parametrize(
    ("caches", "reason"),
    [
        (lambda n, rows: cache(n, rows, grown=n // 2 + 1), "grows by a rule"),
        (lambda n, rows: cache(n, rows, seen=n * n), "counts by a rule"),
        (lambda n, rows: cache(n, 1), "grows by a rule"),
        (lambda n, rows: Cache(cache(n, rows).layers[: n - 4]), "changes its form"),
        (lambda n, rows: {"common": torch.full((3,), float(n))}, "do not have apart"),
        (lambda n, rows: cache(n, 3 * rows - 2), "keeps rows together"),
    ],
)
def test_a_form_that_cannot_be_told_is_refused(caches, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        CacheTree.of((5, caches(5, 1)), [(6, caches(6, 1)), (9, caches(9, 1))], caches(5, 2))


def test_a_cache_is_a_layers_kv_and_states_and_back():
    tree = learnt()
    packing = Packing(tree, tree.read(cache(5)), layers=2, dtype=torch.float32)
    before, whole = cache(5), cache(9)
    for mine, other in zip(before.layers, whole.layers, strict=True):
        mine.keys = other.keys[:, :, :5].clone()
    prefix = packing.pack(tree.read(before), 5, 0)
    own = [t[:, :, 5:] if leaf.tokens else t for leaf, t in zip(tree.leaves, tree.read(whole), strict=True)]
    chunk = packing.pack(own, 4, 5)
    assert (chunk.tokens, chunk.encoded_at) == (4, 5)
    assert [(state.layer, state.name) for state in chunk.states] == [
        (0, "layers.0.states.0"),
        (1, "layers.1.states.0"),
    ]
    assert chunk.shape.token_bytes == 2 * HEADS * WIDTH * 4
    assert chunk.shape.state_bytes == 2 * 5 * 4
    for found, expected in zip(packing.unpack([prefix, chunk]), tree.read(whole), strict=True):
        assert torch.equal(found, expected)


def test_kv_of_another_form_is_no_cache_of_this_model():
    tree = learnt()
    packing = Packing(tree, tree.read(cache(5)), layers=2, dtype=torch.float32)
    kv = packing.pack(tree.read(cache(5)), 5, 0)
    object.__setattr__(kv, "states", kv.states[::-1])
    with pytest.raises(ValueError, match="has the state"):
        packing.unpack([kv])


def test_what_grows_in_another_type_is_refused():
    tree = learnt()
    with pytest.raises(UnsupportedModelError, match="another type"):
        Packing(tree, tree.read(cache(5)), layers=2, dtype=torch.bfloat16)
