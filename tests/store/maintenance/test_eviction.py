"""KV within a budget: what is admitted, what is evicted for it, and what is never evicted."""

import math
import shutil
import tempfile
from functools import partial
from pathlib import Path

import pytest
import storekit
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from storekit import identity, kv_of, put_kv
from watchedlock import Alone

from ragkv.store import KVIdentity, Store, Use
from ragkv.store.codecs import Int8
from ragkv.store.maintenance.eviction import HALF_LIFE, NEVER, elapsed, eviction_score, used
from ragkv.store.tables import digest

PER_TOKEN = kv_of(identity(1)).nbytes


write = partial(storekit.write, kv=False)


def use(of, chunk_id, **counts):
    return {of.key(): Use(tokens=len(of.chunk_ids), nbytes=kv_of(of).nbytes, owner=digest(chunk_id), **counts)}


def ask(store, of, chunk_id):
    """Look up KV as a question does: compute it on a miss, and record the use. Returns whether it was a hit."""
    result = store.get_kv(of)
    store.record_uses(use(of, chunk_id, hits=1) if result else use(of, chunk_id, misses=1))
    if result is None:
        put_kv(store, of, kv_of(of), chunk_id)
    else:
        assert torch.equal(result.keys[0], kv_of(of).keys[0])
    return result is not None


def sound(store):
    verification = store.maintenance.verify()
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


def test_a_chunk_of_other_tokens_never_comes_to_need_the_record(store):
    write(store, "a", (1, 2), (3, 4))
    ask(store, identity(1, 2), "a#0")
    store.record_uses(use(identity(1, 2), "a#1", hits=1))
    assert store.kv_of("a#1") == []
    assert sound(store)


def test_what_several_chunks_need_leaves_all_of_them(store):
    for name in ("a", "b"):
        write(store, name, (1, 2), kv=True)
    assert store.set_budget(0) == 1
    assert store.kv_of("a#0") == store.kv_of("b#0") == []
    assert sound(store)


def test_what_no_question_has_used_leaves_before_all_else_also_of_another_encoding(store):
    write(store, "a", (1, 2), (3, 4), kv=True)
    prefixed = identity(1, 2, prefix_ids=(9,))
    store.set_budget(store.kv_bytes)
    store.record_uses(use(identity(3, 4), "a#1", hits=1))
    assert not ask(store, prefixed, "a#0")
    assert ask(store, prefixed, "a#0")
    assert [record.encoding for record in store.kv_of("a#0")] == ["prefixed"]
    assert len(store.kv_of("a#1")) == 1
    assert sound(store)


def test_the_prefix_and_what_is_staged_stay(store):
    write(store, "a", (1,), (2,), kv=True)
    store.keep_kv(identity(7), kv_of(identity(7)))
    store.stage_kv([(identity(8), kv_of(identity(8)))])
    assert store.set_budget(0) == 2
    assert store.kv_bytes == 2 * PER_TOKEN
    assert store.has_kv(identity(7))
    assert store.has_kv(identity(8))
    assert not put_kv(store, identity(1), kv_of(identity(1)), "a#0")


def test_what_was_used_since_it_was_found_stays(store):
    write(store, "a", *[(n,) for n in range(5)])
    store.set_budget(3 * PER_TOKEN)
    for n in range(4):  # for the last one, eviction candidates are collected, and the first is evicted
        ask(store, identity(n), f"a#{n}")
    for _ in range(5):
        ask(store, identity(1), "a#1")
    ask(store, identity(4), "a#4")
    assert [store.has_kv(identity(n)) for n in range(5)] == [False, True, False, True, True]
    assert sound(store)


def test_several_that_come_together_stay_within_the_budget(store):
    write(store, "a", (1,), (2,), (3,))
    store.set_budget(2 * PER_TOKEN)
    store.put_many([(identity(n), kv_of(identity(n)), f"a#{n - 1}") for n in (1, 2, 3)])
    assert store.kv_bytes == 2 * PER_TOKEN
    assert sound(store)


def test_what_is_written_over_needs_no_room(store):
    write(store, "a", (1,), (2,))
    store.set_budget(2 * PER_TOKEN)
    ask(store, identity(1), "a#0")
    ask(store, identity(2), "a#1")
    assert put_kv(store, identity(2), kv_of(identity(2)), "a#1")
    assert store.has_kv(identity(1))
    assert store.ledger().evictions == 0


def test_a_larger_form_of_a_record_makes_room_among_the_others(tmp_path):
    first, second = sorted((identity(*[n] * 20) for n in (1, 2)), key=KVIdentity.key)
    size = 20 * PER_TOKEN
    with Store.create(tmp_path / "index", codec=Int8()) as small:
        write(small, "a", (1,) * 20, (2,) * 20, kv=True)
        put_kv(small, second, kv_of(first), f"a#{second.chunk_ids[0] - 1}")  # same length for both
        smaller = small.kv_bytes // 2
    assert smaller < size
    with Store.open(tmp_path / "index") as store:
        store.set_budget(smaller + size - 1)
        assert put_kv(store, first, kv_of(first), f"a#{first.chunk_ids[0] - 1}")
        assert store.kv_bytes == size
        assert not store.has_kv(second)
        assert sound(store)


def test_what_is_worth_as_much_stays(store):
    write(store, "a", (1,), (2,))
    store.set_budget(PER_TOKEN)
    store.record_uses(use(identity(1), "a#0", wanted=1) | use(identity(2), "a#1", wanted=1))
    assert put_kv(store, identity(1), kv_of(identity(1)), "a#0")
    assert not put_kv(store, identity(2), kv_of(identity(2)), "a#1")
    assert store.has_kv(identity(1))


def test_what_is_staged_again_since_it_was_found_stays(store):
    write(store, "a", (1,), (2,), (3,), kv=True)
    write(store, "b", (4,), (5,))
    store.set_budget(3 * PER_TOKEN)
    ask(store, identity(4), "b#0")  # collects eviction candidates and evicts one; no question has used it
    store.delete_document("a")
    staged = [identity(2), identity(3)]
    store.stage_kv([(of, kv_of(of)) for of in staged])
    ask(store, identity(5), "b#1")
    assert all(map(store.has_kv, staged))
    assert [store.has_kv(identity(n)) for n in (4, 5)] == [False, True]


def test_a_lowered_budget_is_kept_by_the_next_that_writes_and_in_small_transactions(store, monkeypatch):
    write(store, "a", *[(n,) for n in range(1, 201)], kv=True)
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


@pytest.mark.parametrize("second", ["let in", "shrink"])
@pytest.mark.parametrize("first", ["let in", "shrink"])
def test_one_thread_at_a_time_chooses_what_leaves(store, monkeypatch, first, second):
    """Two threads with the same candidates would evict too little or too much."""
    ids = [identity(n, n) for n in range(12)]
    write(store, "a", *[(n, n) for n in range(12)])
    for n, of in enumerate(ids[:8]):
        ask(store, of, f"a#{n}")
    store.set_budget(6 * 2 * PER_TOKEN)
    evictor = store._evictor
    ways = {
        "let in": lambda n: put_kv(store, ids[n], kv_of(ids[n]), f"a#{n}"),
        "shrink": lambda n: evictor.shrink(),
    }
    alone, walk = Alone(lambda: ways[second](9)), evictor._excess

    def excess(*more):
        alone.enter()
        return walk(*more)

    monkeypatch.setattr(evictor, "_excess", excess)
    monkeypatch.setattr(evictor, "_lock", alone.lock)
    ways[first](8)
    alone.end()
    assert store.stats().kv_bytes <= 6 * 2 * PER_TOKEN
    assert sound(store)


def test_what_is_asked_for_again_and_again_gets_in(store):
    """KV is rejected while the stored KV is worth more; repeated requests raise its worth until it is admitted."""
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
    for of, chunk_id in ((identity(1, 2), "a#0"), (identity(3, 4, 5), "a#1"), (identity(3, 4, 5), "a#1")):
        ask(store, of, chunk_id)
    store.record_uses(use(identity(1, 2), "a#0", hits=4), seconds_per_token=0.5)
    found = store.ledger()
    assert (found.hits, found.misses, found.hit_tokens) == (5, 2, 3 + 8)
    assert found.saved_seconds == 4.0  # the first hit preceded any measured rate
    assert found.hit_rate == 5 / 7
    assert sorted(row.count for _, row in store.uses()) == [2, 5]


def test_uses_are_forgotten_when_neither_kv_nor_chunk_is_there(store):
    write(store, "a", (1,), (2,))
    ask(store, identity(1), "a#0")
    store.record_uses(use(identity(2), "a#1", misses=1) | use(identity(3), "gone#0", misses=1))
    for dry_run, left in ((True, 3), (False, 2)):
        assert store.maintenance.collect(in_use=lambda _: True, dry_run=dry_run).uses == 1
        assert len(dict(store.uses())) == left
    store._write(lambda txn: txn.put("uses", identity(2).key(), b"x"))
    assert store.maintenance.collect(in_use=lambda _: True).uses == 1
    assert dict(store.uses()).keys() == {identity(1).key()}


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
    """Random sequences of documents, questions and budgets, compared with dicts that sort everything."""

    def __init__(self):
        super().__init__()
        self.path = Path(tempfile.mkdtemp())
        self.store = Store.create(self.path)
        self.documents = {}  # name -> tokens of its chunks
        self.held = {}  # tokens -> chunks that need the KV
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
        own = eviction_score(self.weights[ids], len(ids), size)
        leaving, free = [], 0 if self.budget is None else self.budget - self.total()
        for weight, other in self.order():
            value = NEVER if weight == NEVER else eviction_score(weight, len(other), PER_TOKEN * len(other))
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
        for ids, names in self.held.items():
            with self.store._database.read() as txn:
                assert set(txn.values("references", identity(*ids).key())) == set(map(digest, names))
        pinned = sum(PER_TOKEN * len(ids) for ids in self.pinned & self.held.keys())
        assert self.budget is None or self.store.kv_bytes <= max(self.budget, pinned)
        assert self.store.maintenance.verify().findings == ()

    def teardown(self):
        self.store.close()
        shutil.rmtree(self.path)


TestBudget = BudgetMachine.TestCase
TestBudget.settings = settings(max_examples=30, stateful_step_count=25)


# ---- worth


def test_a_scan_over_all_chunks_does_not_evict_what_is_read_often(store):
    write(store, "a", *[(n,) for n in range(12)])
    store.set_budget(2 * PER_TOKEN)
    for n in [0, 1] * 4 + list(range(2, 12)):
        ask(store, identity(n), f"a#{n}")
    assert [n for n in range(12) if store.has_kv(identity(n))] == [0, 1]
    assert (store.ledger().hits, store.ledger().evictions, store.ledger().refused) == (6, 0, 10)


def test_what_interest_has_left_is_evicted(store):
    """KV that was used very often leaves when the questions' topic has changed, however often it was used."""
    write(store, "a", (0,), (1,))
    store.set_budget(PER_TOKEN)
    ask(store, identity(0), "a#0")
    store.record_uses(use(identity(0), "a#0", hits=1000))
    for _ in range(60):
        ask(store, identity(1), "a#1")
    assert [store.has_kv(identity(n)) for n in (0, 1)] == [False, True]


def test_the_score_is_the_saved_time_per_byte():
    assert eviction_score(3.0, 100, 1000) > eviction_score(3.0, 100, 2000)
    assert eviction_score(3.0, 200, 1000) > eviction_score(3.0, 100, 1000)


times = st.lists(st.floats(0, 50), min_size=1, max_size=20)


@given(times)
def test_a_weight_is_the_logarithm_of_all_uses_each_at_its_time(clocks):
    weight = NEVER
    for clock in sorted(clocks):
        weight = used(weight, clock)
    assert weight == pytest.approx(math.log2(sum(2.0**clock for clock in clocks)))


@given(st.floats(1, 1e12), st.floats(0, 1e12))
def test_the_clock_moves_by_a_half_life_when_so_many_rooms_were_read(nbytes, room):
    step = elapsed(nbytes, room)
    assert 0 < step <= 1 / HALF_LIFE
    if room >= nbytes:
        assert step * HALF_LIFE == pytest.approx(nbytes / room)
    assert used(5.0, 6.0, 2) == pytest.approx(math.log2(2**5 + 2 * 2**6))
