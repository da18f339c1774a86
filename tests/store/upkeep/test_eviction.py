"""KV within a budget: what is let in, what leaves for it, and what stays whatever happens."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ragkv.attention.kv import ChunkKV
from ragkv.store import KVIdentity, Store, Use
from ragkv.store.transaction import digest
from ragkv.store.worth import NEVER, elapsed, used, worth
from ragkv.types import Chunk, Document, Encoding

PER_TOKEN = 2 * 4 * 16 * 4
"""Bytes of the KV of one token below."""


def identity(*ids, encoding=Encoding.STANDALONE):
    return KVIdentity(
        model="m", encoding=encoding, prefix_ids=(9,) if encoding is Encoding.PREFIXED else (), chunk_ids=ids
    )


def kv_of(of):
    generator = torch.Generator().manual_seed(int.from_bytes(of.key()[:4], "big"))
    tensor = torch.randn(4, len(of.chunk_ids), 16, generator=generator)
    return ChunkKV(keys=(tensor,), values=(-tensor,), encoded_at=len(of.prefix_ids))


def write(store, name, *tokens, needs=False):
    """A document of chunks with these token ids; with `needs`, all of their KV."""
    chunks = [
        Chunk(chunk_id=f"{name}#{n}", document_id=name, ordinal=n, text="t", token_ids=ids, start=n, end=n)
        for n, ids in enumerate(tokens)
    ]
    needed = {chunk.chunk_id: [identity(*chunk.token_ids)] for chunk in chunks} if needs else {}
    store.write_document(
        Document(document_id=name, source=name, content_hash=str(tokens)),
        "text",
        chunks,
        recipe="r",
        records=[(of, kv_of(of)) for wanted in needed.values() for of in wanted],
        references=needed,
    )


def use(of, chunk, **counts):
    return {of.key(): Use(tokens=len(of.chunk_ids), nbytes=kv_of(of).nbytes, owner=digest(chunk), **counts)}


def ask(store, of, chunk):
    """What a question does: find the KV or make it, and say so. Whether it was there."""
    found = store.get_kv(of)
    store.record_uses(use(of, chunk, hits=1) if found else use(of, chunk, misses=1))
    if found is None:
        store.put_kv(of, kv_of(of), chunk_id=chunk)
    else:
        assert torch.equal(found.keys[0], kv_of(of).keys[0])
    return found is not None


@pytest.fixture
def store(tmp_path):
    with Store.create(tmp_path / "index") as made:
        yield made


def sound(store):
    verification = store.verify()
    return verification.findings == () and verification.orphans.records == 0


def test_kv_that_is_made_later_belongs_to_its_chunk_and_goes_with_it(store):
    write(store, "a", (1, 2), (3, 4))
    assert store.stats().kv_records == 0
    assert sound(store)
    assert not ask(store, identity(1, 2), "a#0")
    assert ask(store, identity(1, 2), "a#0")
    assert [record.shared_by for record in store.kv_of("a#0")] == [1]
    assert store.kv_of("a#1") == []
    assert sound(store)
    store.delete_document("a")
    assert store.stats().kv_records == 0
    assert dict(store.uses()) == {}
    assert sound(store)


def test_chunks_of_the_same_tokens_share_what_was_made_for_one_of_them(store):
    for name in ("a", "b"):
        write(store, name, (1, 2))
    ask(store, identity(1, 2), "a#0")
    assert ask(store, identity(1, 2), "b#0")
    assert [record.shared_by for record in store.kv_of("b#0")] == [2]
    store.delete_document("a")
    assert ask(store, identity(1, 2), "b#0")
    assert sound(store)


def test_a_chunk_of_other_tokens_never_comes_to_need_the_record(store):
    write(store, "a", (1, 2), (3, 4))
    ask(store, identity(1, 2), "a#0")
    store.record_uses(use(identity(1, 2), "a#1", hits=1))
    assert store.kv_of("a#1") == []
    assert sound(store)


def test_what_is_used_least_leaves_first(store):
    chunks = [(n, n) for n in range(1, 5)]
    write(store, "a", *chunks)
    store.set_budget(3 * 2 * PER_TOKEN)
    for n, times in ((0, 3), (1, 1), (2, 2)):
        for _ in range(times):
            ask(store, identity(*chunks[n]), f"a#{n}")
    ask(store, identity(*chunks[3]), "a#3")
    assert [bool(store.kv_of(f"a#{n}")) for n in range(4)] == [True, False, True, True]
    assert store.kv_bytes == store.budget
    assert store.ledger().evictions == 1
    assert sound(store)


def test_of_what_is_used_as_often_the_one_used_longer_ago_leaves(store):
    chunks = [(n,) for n in range(1, 5)]
    write(store, "a", *chunks)
    store.set_budget(2 * PER_TOKEN)
    for n in range(4):
        ask(store, identity(*chunks[n]), f"a#{n}")
    assert [bool(store.kv_of(f"a#{n}")) for n in range(4)] == [False, False, True, True]


def test_what_no_question_has_used_leaves_before_all_else_also_of_another_encoding(store):
    write(store, "a", (1, 2), (3, 4), needs=True)
    prefixed = identity(1, 2, encoding=Encoding.PREFIXED)
    store.set_budget(store.kv_bytes)
    store.record_uses(use(identity(3, 4), "a#1", hits=1))
    assert not ask(store, prefixed, "a#0")
    assert ask(store, prefixed, "a#0")
    assert [record.encoding for record in store.kv_of("a#0")] == ["prefixed"]
    assert len(store.kv_of("a#1")) == 1
    assert sound(store)


def test_the_prefix_and_what_is_staged_stay(store):
    write(store, "a", (1,), (2,), needs=True)
    store.keep_kv(identity(7), kv_of(identity(7)))
    store.stage_kv([(identity(8), kv_of(identity(8)))])
    assert store.set_budget(0) == 2
    assert store.kv_bytes == 2 * PER_TOKEN
    assert store.has_kv(identity(7))
    assert store.has_kv(identity(8))
    assert not store.put_kv(identity(1), kv_of(identity(1)), chunk_id="a#0")


def test_what_is_being_read_stays_whatever_it_is_worth(store):
    write(store, "a", (1,), (2,), (3,))
    for n in range(2):
        ask(store, identity(n + 1), f"a#{n}")
    read = {identity(1).key()}
    store.spare(read.__contains__)
    assert store.set_budget(0) == 1
    assert store.has_kv(identity(1))
    read.clear()
    assert store.set_budget(0) == 1
    assert store.kv_bytes == 0


def test_a_lowered_budget_is_kept_by_the_next_that_writes_and_in_small_transactions(store, monkeypatch):
    write(store, "a", *[(n,) for n in range(1, 201)], needs=True)
    sizes, honest = [], store._database.write

    def counted(apply, **more):
        before = store.kv_bytes
        result = honest(apply, **more)
        sizes.append((before - store.kv_bytes) // PER_TOKEN)
        return result

    monkeypatch.setattr(store._database, "write", counted)
    assert store.set_budget(10 * PER_TOKEN) == 190
    assert max(sizes) == 64
    assert store.kv_bytes == 10 * PER_TOKEN


def test_a_reader_that_looked_before_an_eviction_reads_on(store):
    write(store, "a", (1, 2), needs=True)
    with store.mapped_kv(identity(1, 2)) as mapped:
        with Store.open(store.directory.parent) as other:
            other.set_budget(0)
        assert torch.equal(mapped.keys[0], kv_of(identity(1, 2)).keys[0])
    assert store.get_kv(identity(1, 2)) is None


def test_what_is_asked_for_again_and_again_gets_in(store):
    """Refused while what is there is worth more, and remembered: in the end it is worth more."""
    write(store, "a", (1,), (2,))
    store.set_budget(PER_TOKEN)
    for _ in range(4):
        ask(store, identity(1), "a#0")
    there = []
    for _ in range(4):
        ask(store, identity(2), "a#1")
        there.append(store.has_kv(identity(2)))
    assert there == [False, False, True, True]
    assert store.ledger().refused == 2


def test_the_ledger_adds_up(store):
    write(store, "a", (1, 2), (3, 4, 5))
    for of, chunk in ((identity(1, 2), "a#0"), (identity(3, 4, 5), "a#1"), (identity(3, 4, 5), "a#1")):
        ask(store, of, chunk)
    store.record_uses(use(identity(1, 2), "a#0", hits=4), seconds_per_token=0.5)
    found = store.ledger()
    assert (found.hits, found.misses, found.hit_tokens) == (5, 2, 3 + 8)
    assert found.saved_seconds == 4.0  # the first hit came before any rate was known
    assert found.hit_rate == 5 / 7
    assert sorted(row.count for _, row in store.uses()) == [2, 5]


@pytest.mark.parametrize("broken", [b"", b"[]", b'{"hits": 1}', b"{" * 100_000, b'"x"', b"1e999"])
def test_a_ledger_that_is_none_begins_anew(store, broken):
    write(store, "a", (1,))
    ask(store, identity(1), "a#0")
    store._write(lambda txn: txn.put("meta", b"fact/kv_ledger", broken))
    store._write(lambda txn: txn.put("meta", b"fact/kv_budget", broken))
    store._write(lambda txn: txn.put("uses", identity(1).key(), b"x" * 80))
    assert store.ledger().hits == 0
    assert store.budget is None
    assert dict(store.uses()) == {}
    ask(store, identity(1), "a#0")
    assert store.ledger().hits == 1


TOKENS = [(1,), (2, 2), (3, 3, 3), (4, 4, 4, 4), (5, 5), (6,)]


class BudgetMachine(RuleBasedStateMachine):
    """Any sequence of documents, questions and budgets, beside dicts that do the same by sorting all there is."""

    def __init__(self):
        super().__init__()
        self.path = Path(tempfile.mkdtemp())
        self.store = Store.create(self.path)
        self.documents = {}  # by name: the tokens of its chunks
        self.held = {}  # by tokens: the chunks that need the KV
        self.weights, self.clock, self.budget = {}, 0.0, None
        self.pinned = set()
        self.spare()

    def spare(self):
        self.store.spare(lambda key: key in {identity(*ids).key() for ids in self.pinned})

    def total(self):
        return sum(PER_TOKEN * len(ids) for ids in self.held)

    def order(self):
        return sorted((self.weights.get(ids, NEVER), ids) for ids in self.held if ids not in self.pinned)

    @rule(name=st.sampled_from("abc"), tokens=st.lists(st.sampled_from(TOKENS), max_size=4, unique=True))
    def write(self, name, tokens):
        write(self.store, name, *tokens)
        self.forget(name)
        self.documents[name] = tokens

    @rule(name=st.sampled_from("abc"))
    def delete(self, name):
        assert self.store.delete_document(name) == (name in self.documents)
        self.forget(name)

    def forget(self, name):
        for n, ids in enumerate(self.documents.pop(name, [])):
            if ids in self.held:
                self.held[ids].discard(f"{name}#{n}")
                if not self.held[ids]:
                    del self.held[ids]
                    self.weights.pop(ids, None)

    @rule(name=st.sampled_from("abc"), n=st.integers(0, 3))
    def ask(self, name, n):
        if n >= len(self.documents.get(name, [])):
            return
        ids = self.documents[name][n]
        size = PER_TOKEN * len(ids)
        room = 1 << 30 if self.budget is None else self.budget
        self.clock += elapsed(size, room)
        self.weights[ids] = used(self.weights.get(ids, NEVER), self.clock)
        hit = ask(self.store, identity(*ids), f"{name}#{n}")
        assert hit == (ids in self.held)
        if hit:
            self.held[ids].add(f"{name}#{n}")
            return
        own = worth(self.weights[ids], len(ids), size)
        leaving, free = [], 0 if self.budget is None else self.budget - self.total()
        for weight, other in self.order():
            value = NEVER if weight == NEVER else worth(weight, len(other), PER_TOKEN * len(other))
            if self.budget is None or free >= size or value >= own:
                break
            leaving.append(other)
            free += PER_TOKEN * len(other)
        if self.budget is None or (size <= self.budget and free >= size):
            for other in leaving:
                del self.held[other]
            self.held[ids] = {f"{name}#{n}"}

    @rule(tokens=st.none() | st.integers(0, 12))
    def budgeted(self, tokens):
        self.budget = None if tokens is None else tokens * PER_TOKEN
        self.store.set_budget(self.budget)
        while self.budget is not None and self.total() > self.budget and self.order():
            del self.held[self.order()[0][1]]

    @rule(ids=st.sets(st.sampled_from(TOKENS), max_size=2))
    def read(self, ids):
        self.pinned = ids

    @rule()
    def reopen(self):
        self.store.close()
        self.store = Store.open(self.path)
        self.spare()

    @invariant()
    def equal(self):
        assert {ids for ids in TOKENS if self.store.has_kv(identity(*ids))} == self.held.keys()
        assert self.store.kv_bytes == self.total()
        for ids, chunks in self.held.items():
            with self.store._database.read() as txn:
                assert set(txn.values("references", identity(*ids).key())) == {digest(chunk) for chunk in chunks}
        pinned = sum(PER_TOKEN * len(ids) for ids in self.pinned & self.held.keys())
        assert self.budget is None or self.store.kv_bytes <= max(self.budget, pinned)
        assert self.store.verify().findings == ()

    def teardown(self):
        self.store.close()
        shutil.rmtree(self.path)


TestBudget = BudgetMachine.TestCase
TestBudget.settings = settings(max_examples=30, stateful_step_count=25, deadline=None, derandomize=True)
