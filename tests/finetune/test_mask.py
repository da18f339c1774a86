"""Who sees whom in a packed row, token by token."""

from __future__ import annotations

import torch

from ragkv.benchmarks.mini.layout import layout
from ragkv.finetune.mask import visible


def test_block_chunks_see_neither_prefix_nor_each_other() -> None:
    row = layout(2, [2, 1], [2, 1])
    assert row.positions == [0, 1, 2, 3, 4, 5, 6, 5]
    segments, asks = torch.tensor([row.segments] * 2), torch.tensor([row.asks] * 2)
    full, block = visible(segments, asks, torch.tensor([False, True]))[:, 0].int().tolist()
    assert block == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 0, 0, 1],
    ]
    assert full[:5] == [[1] * (index + 1) + [0] * (7 - index) for index in range(5)]
    assert full[5:] == block[5:]
