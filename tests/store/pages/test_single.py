"""A page checked alone is accepted or refused as it is among many."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ragkv.store import Store
from ragkv.store.pages.page import BRANCH, LEAF, PageFile
from ragkv.store.pages.single import plain_nodes
from ragkv.store.pages.snapshot import Checker
from ragkv.store.seal import DamagedError

PAGE = 4096


def alone(raw: bytes, number: int, pages: int, *, branch: bool) -> object:
    try:
        return plain_nodes(raw, number, branch=branch, pages=pages)
    except DamagedError:
        return "damaged"


def among_many(file: PageFile, number: int, *, branch: bool) -> object:
    try:
        nodes = file.nodes(np.array([number]), BRANCH if branch else LEAF, least=1 + branch)
        if not branch:
            Checker(file, width=32, heads=False).plain_leaf(nodes)
        keys = nodes.keys(np.arange(len(nodes.page)))
        return ([b"", *keys[1:]], nodes.children.tolist()) if branch else (keys, [])
    except DamagedError:
        return "damaged"


def test_one_page_is_judged_as_many_are(tmp_path: Path, write: Callable[..., object]) -> None:
    with Store.create(tmp_path, map_size=1 << 20) as store:
        for n in range(12):
            write(store, f"{n}", *[(n, m) for m in range(12)], tuple(range(300)))
    data = tmp_path / "store" / "data.mdb"
    raw = data.read_bytes()
    kinds = {number: raw[number * PAGE + 10] for number in range(2, len(raw) // PAGE)}
    chosen = [next(n for n, kind in kinds.items() if kind == BRANCH)]
    chosen += [number for number, kind in kinds.items() if kind == LEAF][:6]
    rng = random.Random(1)
    answers = []
    descriptor = os.open(data, os.O_RDWR)
    try:
        file = PageFile(descriptor, page_size=PAGE, pages=len(raw) // PAGE)
        for number in chosen:
            page = raw[number * PAGE : (number + 1) * PAGE]
            branch = kinds[number] == BRANCH
            spots = [*range(16 + 2 * 12), *(rng.randrange(PAGE) for _ in range(150))]
            for at in [None, *spots]:
                changed = bytearray(page)
                if at is not None:
                    changed[at] ^= 1 << rng.randrange(8)
                os.pwrite(descriptor, changed, number * PAGE)
                answers.append(alone(bytes(changed), number, file.pages, branch=branch))
                assert answers[-1] == among_many(file, number, branch=branch), (number, at)
            os.pwrite(descriptor, page, number * PAGE)
    finally:
        os.close(descriptor)
    assert 100 < answers.count("damaged") < len(answers) - 100
