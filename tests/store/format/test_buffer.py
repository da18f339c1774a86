"""Memory is used again when nobody refers to it any more, and never before."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ragkv.store.format import buffer
from ragkv.store.format.buffer import drop_spares, new_buffer, spare_bytes

MIB = 1 << 20


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    drop_spares()
    yield
    drop_spares()


def address(array: np.ndarray) -> int:
    found: int = array.__array_interface__["data"][0]
    return found


def test_memory_comes_back_when_the_last_tensor_has_gone() -> None:
    first = new_buffer(3 * MIB)
    place = address(first)
    tensor = torch.from_numpy(first.view("i2")).view(torch.bfloat16)[5:7]
    del first
    assert spare_bytes() == 0
    assert address(new_buffer(3 * MIB)) != place  # and this one comes back at once
    tensor.fill_(1)
    del tensor
    assert spare_bytes() == 8 * MIB
    taken = [new_buffer(3 * MIB), new_buffer(3 * MIB)]
    assert place in map(address, taken)
    assert spare_bytes() == 0


def test_buffers_are_writable_bytes_of_the_asked_length() -> None:
    for nbytes in (0, 1, MIB - 1, MIB, 2 * MIB + 1):
        made = new_buffer(nbytes)
        assert (made.dtype, made.shape) == (np.uint8, (nbytes,))
        made[:] = 7
        assert address(made) % 16 == 0


def test_spares_that_are_much_too_long_are_left_for_others() -> None:
    del [new_buffer(64 * MIB)][0]
    assert spare_bytes() == 64 * MIB
    small = new_buffer(2 * MIB)
    assert spare_bytes() == 64 * MIB
    del small
    large = new_buffer(33 * MIB)
    assert spare_bytes() == 2 * MIB
    del large


def test_only_so_much_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer, "SPARE_BYTES", 10 * MIB)
    held = [new_buffer(4 * MIB) for _ in range(5)]
    held.clear()
    assert spare_bytes() == 8 * MIB
    del [new_buffer(100 * MIB)][0]
    assert spare_bytes() <= 10 * MIB


def test_no_room_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="no room"):
        new_buffer(1 << 60)
