"""Damage a small store in one place at a time, and read and write it in child processes, so that crashes are detected.

python tests/support/damage.py [--heads] [--deep] [--sample N] [--seed S] [--part K/N]

prints JSON: the number of each outcome, and outcomes that must never occur. Every case is tested on a store that is
opened for reading, and on one that is opened for writing and written to. All bytes are tested, or with `--heads` all
bits of the pages' headers; of these, only `--sample` many, or every N-th. `--deep`: many documents with long ids, whose
pages have few entries, and of which many are deleted.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import logging
import mmap
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from storekit import chunk, document, equal, identity, kv_of, put_kv

from ragkv.errors import CorruptStoreError, RagkvError
from ragkv.store import KVIdentity, Store, Zstd
from ragkv.store.documents import drop_document
from ragkv.store.tables import digest
from ragkv.types import Chunk, Document

PAGE = mmap.PAGESIZE
BATCH = 40
SECONDS = 600  # for one batch: longer means an endless loop


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """Damage to the file: `flip` the bits `value` of byte `at`, `cut` it there, or zero the `sector` there."""

    kind: str
    at: int
    value: int
    write: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    """A document as it should be in the store."""

    document: Document
    text: str
    chunks: list[Chunk]

    @classmethod
    def make(cls, name: str, chunks: list[tuple[int, ...]], text: str = "") -> Content:
        rows = [dataclasses.replace(chunk(name, n, ids), text=f"t{n}") for n, ids in enumerate(chunks)]
        return cls(document(name), text or f"the text of {name}", rows)

    @property
    def identities(self) -> list[KVIdentity]:
        return list({identity(*chunk.token_ids): None for chunk in self.chunks})

    def write(self, store: Store) -> None:
        store.write_document(
            self.document,
            self.text,
            self.chunks,
            recipe="r",
            records=[(of, kv_of(of)) for of in self.identities],
            references={chunk.chunk_id: [identity(*chunk.token_ids)] for chunk in self.chunks},
        )


CONTENTS = {
    content.document.document_id: content
    for content in (
        Content.make("few", [(1, 2), (3,), (1, 2), (4, 5, 6)]),  # its first record has two chunks: a sub-page
        Content.make("large", [tuple(range(150))], text="long " * 700),  # values in runs of pages
        Content.make("many", [(7, 8)] * 24),  # several pages of chunks
        Content.make("gone", [(9, 9, 9), tuple(range(70))]),  # leaves free pages behind
        Content.make("new", [(7, 8), (10,), tuple(range(120, 220))]),  # written to the damaged store
    )
}
STORED = [name for name in CONTENTS if name != "new"]
DEEP = {name: Content.make(name, [(n, n + 1)]) for n in range(60) for name in [f"{n:02}" + "x" * 400]}


def make_store(path: Path) -> None:
    """Documents in raw and zstd records, and free pages. The last two transactions have the same documents, so that a
    flip that restores the last but one is not damage.
    """
    with Store.create(path, map_size=256 << 10) as store:
        for name in STORED[:2]:
            CONTENTS[name].write(store)
    with Store.open(path, codec=Zstd()) as store:
        for name in STORED[2:]:
            CONTENTS[name].write(store)
        # enough references for a subtree.
        key, names = identity(7, 8).key(), [f"elsewhere#{n}" for n in range(50)]
        store._live().write(lambda txn: [txn.put("references", key, digest(name)) for name in names])
        store.delete_document("gone")
        store.put_meta("model", "c0ffee")
        store.put_meta("model", "c0ffee")


def require(right: bool, what: str) -> None:
    if not right:
        raise AssertionError(what)


@contextlib.contextmanager
def excused() -> Iterator[None]:
    with contextlib.suppress(RagkvError):
        yield


def read(store: Store) -> None:
    """Read everything: each value is right, missing, or an error about the damage."""
    for name, content in CONTENTS.items():
        with excused():
            stored = store.document(name)
            require(stored is None or stored.document == content.document, f"document {name}")
        with excused():
            require(store.text(name) in (None, content.text), f"text {name}")
        with excused():
            require(all(chunk in content.chunks for chunk in store.chunks(name)), f"chunks of {name}")
        with excused():
            found = store.chunk_many([chunk.chunk_id for chunk in content.chunks])
            require(all(found.get(chunk.chunk_id, chunk) == chunk for chunk in content.chunks), f"chunks {name}")
        for of in content.identities:
            with excused():
                kv = store.get_kv(of)
                require(kv is None or equal(kv, KVS[of]), f"tensor of {name}")
            with excused():
                store.has_kv(of)
    documents = [content.document for content in CONTENTS.values()]
    with excused():
        require(all(stored.document in documents for stored in store.documents()), "documents")
    with excused():
        require(all(chunk in CONTENTS[chunk.document_id].chunks for chunk in store.chunks()), "chunks")
    rest: list[Callable[[], Any]] = [
        lambda: list(store.maintenance.orphans()),
        store.stats,
        lambda: store.generation,
        lambda: store.get_meta("model"),
        lambda: list(store.document_stats()),
        lambda: store.maintenance.collect(in_use=lambda _: True, dry_run=True),
        store.maintenance.models,
        lambda: store.maintenance.verify(quick=True),
    ]
    for call in rest:
        with excused():
            call()


KVS = {of: kv_of(of) for content in CONTENTS.values() for of in content.identities}


def sound(store: Store) -> bool:
    try:
        store._live().check_pages()
    except CorruptStoreError:
        return False
    return True


def attempt(path: Path, data: bytes, case: Case) -> str:
    """`refused` (at open), `read`, `written`, or `not written` (with an error that says why)."""
    damage(data, case, path)
    try:
        store = Store.open(path, readonly=not case.write)
    except RagkvError:
        return "refused"
    with store:
        if not case.write:
            read(store)
            return "read"
        gone = [name for name in CONTENTS if name in DEEP]
        changes: list[Callable[[], Any]] = [partial(store.delete_document, name) for name in gone[3:8]]
        changes += [
            lambda: store._live().write(lambda txn: [drop_document(txn, name) for name in gone[8:50]]),
            lambda: CONTENTS["new"].write(store),
            lambda: store.delete_document("large"),
            lambda: put_kv(store, identity(3), KVS[identity(3)], "few#1"),
            lambda: store.put_meta("model", "decaf"),
            lambda: store.delete_document("many"),
        ]
        outcome = "written"
        for change in changes:
            try:
                change()
            except RagkvError:
                outcome = "not written"
        after = sound(store)
        read(store)
    try:
        Store.open(path).close()
    except RagkvError:
        after = False
    require(after, "the pages after a write")
    return outcome


def damage(data: bytes, case: Case, path: Path) -> None:
    damaged = bytearray(data)
    if case.kind == "flip":
        damaged[case.at] ^= case.value
    elif case.kind == "sector":
        damaged[case.at : case.at + 512] = bytes(512)
    else:
        del damaged[case.at :]
    shutil.rmtree(path, ignore_errors=True)
    (path / "store").mkdir(parents=True)
    (path / "store" / "data.mdb").write_bytes(damaged)


def child(data: bytes, cases: list[Case], folder: Path, pipe: int) -> None:
    """Test the cases and report each outcome, so that a crash belongs to the first case without one."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(SECONDS)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for case in cases:
        try:
            outcome = attempt(folder / "index", data, case)
        except BaseException as error:
            outcome = f"WRONG {error!r}"
        os.write(pipe, json.dumps(outcome).encode() + b"\n")
    os._exit(0)


def outcomes(data: bytes, cases: list[Case], folder: Path) -> Iterator[tuple[Case, str]]:
    """The outcome of every case, in forked children of `BATCH` cases each."""
    todo = collections.deque(cases)
    while todo:
        batch = [todo[n] for n in range(min(BATCH, len(todo)))]
        folder.mkdir(exist_ok=True)
        source, sink = os.pipe()
        pid = os.fork()
        if not pid:
            child(data, batch, folder, sink)
        os.close(sink)
        with os.fdopen(source) as lines:
            result = [json.loads(line) for line in lines]
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for outcome in result:
            yield todo.popleft(), outcome
        if len(result) < len(batch):
            yield todo.popleft(), f"WRONG died with status {status}"
        shutil.rmtree(folder)


def all_cases(data: bytes, used: int, rng: random.Random) -> list[Case]:
    """One random bit, or all eight, of every byte; every length; every sector of 512 bytes."""
    found = [Case("flip", at, rng.choice([*(1 << bit for bit in range(8)), 0xFF]), False) for at in range(used)]
    found += [Case("cut", at, 0, False) for at in range(used + 1)]
    found += [Case("sector", at, 0, False) for at in range(0, used, 512)]
    return [dataclasses.replace(case, write=write) for case in found for write in (False, True)]


def head_cases(used: int) -> list[Case]:
    """Every bit of the header and the first pointers of every page."""
    return [
        Case("flip", page + at, 1 << bit, write)
        for page in range(0, used, PAGE)
        for at in range(32)
        for bit in range(8)
        for write in (False, True)
    ]


def sampled(cases: list[Case], count: int, rng: random.Random) -> list[Case]:
    """Half of them flips in the headers and pointers of pages, an eighth cuts and lost sectors."""
    heads = [case for case in cases if case.kind == "flip" and case.at % PAGE < 48]
    others = [case for case in cases if case.kind != "flip"]
    rest = [case for case in cases if case.kind == "flip" and case.at % PAGE >= 48]
    return (
        rng.sample(heads, count // 2)
        + rng.sample(others, count // 8)
        + rng.sample(rest, count - count // 2 - count // 8)
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", default="0/1")
    for flag in ("--heads", "--deep"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()
    if options.deep:
        CONTENTS.update(DEEP)
        STORED.extend(DEEP)
        KVS.update((of, kv_of(of)) for content in DEEP.values() for of in content.identities)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_STATE_HOME"] = str(folder / "state")
        make_store(folder / "sound")
        data = (folder / "sound" / "store" / "data.mdb").read_bytes()
        with Store.open(folder / "sound", readonly=True) as store:
            used = store._live().check_pages()
            pages = used.live + used.free + used.unaccounted + 2
        rng = random.Random(options.seed)
        cases = head_cases(pages * PAGE) if options.heads else all_cases(data, pages * PAGE, rng)
        if options.sample is not None:
            count = options.sample
            cases = rng.sample(cases, count) if options.heads else sampled(cases, count, rng)
        part, parts = map(int, options.part.split("/"))
        counts: collections.Counter[str] = collections.Counter()
        wrong = []
        for case, outcome in outcomes(data, cases[part::parts], folder / "damaged"):
            counts[f"{case.kind}, open for {'writing' if case.write else 'reading'}: {outcome[:11]}"] += 1
            if outcome.startswith("WRONG"):
                wrong.append([case.kind, case.at, case.value, case.write, outcome])
            if counts.total() % 1000 == 0:
                print(counts.total(), "cases,", len(wrong), "wrong", file=sys.stderr, flush=True)
        json.dump({"pages": pages, "cases": counts.total(), "counts": counts, "wrong": wrong[:50]}, sys.stdout)


if __name__ == "__main__":
    main()
