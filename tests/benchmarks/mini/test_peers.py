"""Processes that share a step must add up to the gradients of one that takes it alone."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from ragkv.benchmarks.mini.peers import ALONE, Peer, peers

_ROWS = torch.arange(15.0).reshape(5, 3) / 7
_WEIGHTS = torch.tensor([1.0, 0.5, 3.0, 0.25, 2.0])


def _gradients(peer: Peer) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    own = list(peer.rows(len(_ROWS)))
    losses = model(_ROWS[own]).square().sum(-1)
    weights = _WEIGHTS[own]
    ((losses * weights).sum() / weights.sum()).backward()
    peer.mean_gradients(model, float(weights.sum()))
    return [value.grad for value in model.parameters() if value.grad is not None]


def _die(peer: Peer) -> None:
    os._exit(3)


def test_every_row_is_one_process_s() -> None:
    taken = [row for rank in range(3) for row in Peer(rank, 3).rows(10)]
    assert sorted(taken) == list(range(10))


def test_gradients_are_those_of_all_rows() -> None:
    with peers(2, _gradients) as peer:
        shared = _gradients(peer)
    for here, there in zip(shared, _gradients(ALONE), strict=True):
        torch.testing.assert_close(here, there)


def test_a_process_that_dies_ends_the_others_wait() -> None:
    threads = torch.get_num_threads()
    with pytest.raises(RuntimeError), peers(2, _die) as peer:
        _gradients(peer)
    assert torch.get_num_threads() == threads
    assert not torch.distributed.is_initialized()
