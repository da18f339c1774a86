"""What a stacked prompt's tokens see, beside the paper's equations written out."""

from __future__ import annotations

import pytest
import torch

from ragkv.attention.ownkv import OwnKV
from ragkv.attention.stack import Mark, Stack

# p p | c1 c1 | x11 | x12 x12 | c2 c2 c2 | x21 | y11 y12 y21
MARKS = [
    *(Mark(i) for i in range(2)),
    *(Mark(2 + i, 1) for i in range(2)),
    Mark(4, 1, 1),
    *(Mark(4 + i, 1, 2) for i in range(2)),
    *(Mark(2 + i, 2) for i in range(3)),
    Mark(5, 2, 3),
    Mark(5, 1, 1, True),
    Mark(6, 1, 2, True),
    Mark(6, 2, 3, True),
]


def _sees(q: Mark, k: Mark, window: int | None) -> bool:
    causal = q.position >= k.position
    context = q.context == k.context or k.context == 0
    question = q.question == k.question or k.question == 0
    return causal and context and question and (window is None or q.position - k.position < window)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("held", [0, 5, 11])
def test_the_mask_is_equations_6_to_9(held, window):
    stack = Stack((), 0, marks=list(MARKS))
    stack.own.length = held
    n = len(MARKS) - held
    expected = [[_sees(q, k, window) for k in MARKS] for q in MARKS[held:]]
    assert stack.visible(n, window, torch.device("cpu")).tolist() == expected
    assert stack.places(n) == [mark.position for mark in MARKS[held:]]
    assert stack.kept(n) == [11 - held, 12 - held, 13 - held]


def test_the_dead_are_given_up_once_they_are_the_greater_part():
    stack = Stack((), 0, marks=list(MARKS))
    states = torch.arange(11.0).view(1, 1, 11, 1)
    stack.own.append(0, states, states)
    stack.own.commit(11)
    stack.compact(lambda mark: mark.context == 2)
    assert stack.own.length == 11
    stack.compact(lambda mark: mark.context == 2 or mark.question in (1, 2))
    assert stack.own.length == 4
    assert stack.marks == MARKS[:4] + MARKS[11:]
    assert stack.own.chunk_kv().keys[0].flatten().tolist() == [0, 1, 2, 3]


def test_own_kv_keeps_a_choice_of_its_tokens():
    own = OwnKV()
    states = torch.arange(5.0).view(1, 1, 5, 1)
    own.append(0, states, states + 10)
    own.commit(5)
    own.select([1, 3, 4])
    new = torch.full((1, 1, 1, 1), 9.0)
    keys, values = own.append(0, new, new)
    assert keys.flatten().tolist() == [1, 3, 4, 9]
    assert values.flatten().tolist() == [11, 13, 14, 9]
