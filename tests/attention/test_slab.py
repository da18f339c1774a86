"""Own KV of rows side by side: a row finds nothing of whoever had its place before."""

from __future__ import annotations

import torch

from ragkv.attention.slab import Slabs


def test_a_place_is_clean_when_it_is_taken():
    slabs = Slabs()
    first, stays = slabs.place(4, 4, 2), slabs.place(4, 4, 2)
    slab = first.slab
    assert stays.slab is slab
    for own in (first, stays):
        own.append(0, torch.full((1, 2, 8, 4), torch.nan), torch.full((1, 2, 8, 4), torch.nan))
        own.commit(8)
    slot = first.slot
    del first
    again = slabs.place(2, 2, 2)
    assert (again.slab, again.slot) == (slab, slot)
    assert not slab.keys[0][slot].any()
    assert not slab.values[0][slot].any()
    assert slab.keys[0][stays.slot].isnan().any()
