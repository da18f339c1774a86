"""The memory tier stays within its budget, holds nothing twice, and drops what the store deletes."""

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from package import in_child
from storekit import identity, make_kv, put_kv, write

from ragkv.attention.kv import ChunkKV
from ragkv.errors import StoreError
from ragkv.store import KVIdentity, MemoryTier, Store, cache


@pytest.fixture
def kv() -> ChunkKV:
    return make_kv(1)


class Loader:
    """Returns KV for all requested keys, and records the requests."""

    def __init__(self, make: Callable[[bytes], ChunkKV]) -> None:
        self.make = make
        self.asked: list[list[bytes]] = []

    def __call__(self, keys: Sequence[bytes]) -> Mapping[bytes, ChunkKV]:
        self.asked.append(list(keys))
        return {key: self.make(key) for key in keys}


def names(*letters: str) -> list[bytes]:
    return [letter.encode() for letter in letters]


@given(
    budget=st.integers(0, 12),
    queries=st.lists(st.lists(st.integers(1, 7), max_size=5), max_size=20),
)
def test_it_is_an_lru_of_so_many_bytes(budget, queries):
    """Compared with a list in which key n weighs n units."""
    unit = make_kv(1).nbytes
    tier = MemoryTier(budget * unit)
    model: list[int] = []
    counts = [0, 0, 0]
    for query in queries:
        wanted = list(dict.fromkeys(query))
        missing = [n for n in wanted if n not in model]
        load = Loader(lambda key: make_kv(key[0]))
        result, held = tier.get_many([bytes([n]) for n in query], load)
        assert load.asked == ([[bytes([n]) for n in missing]] if missing else [])
        assert {key[0] for key in held} == set(wanted) - set(missing)
        assert all(kv.tokens == key[0] for key, kv in result.items())
        hits = [n for n in wanted if n in model]
        model = [n for n in model if n not in hits] + hits
        counts[0] += len(hits)
        counts[1] += len(missing)
        for n in missing:
            if n <= budget:
                model.append(n)
                while sum(model) > budget:
                    model.pop(0)
                    counts[2] += 1
        del result  # a reference would be a hit even without the tier
        use = tier.use()
        assert (use.entries, use.bytes, use.budget) == (len(model), sum(model) * unit, budget * unit)
        assert [use.hits, use.misses, use.evictions] == counts


def test_an_evicted_entry_lives_for_its_reader_and_no_longer(kv):
    tier = MemoryTier(kv.nbytes)
    result, _ = tier.get_many(names("a"), Loader(lambda _: make_kv(1)))
    tensor = weakref.ref(result[b"a"].keys[0])
    tier.get_many(names("b"), Loader(lambda _: make_kv(1)))
    assert tier.use().bytes == kv.nbytes
    assert tensor() is result[b"a"].keys[0]
    del result
    assert tensor() is None


@pytest.mark.parametrize("budget", [0, 1])
def test_what_a_query_holds_is_not_loaded_again(kv, budget):
    tier = MemoryTier(budget * kv.nbytes)
    load = Loader(lambda _: make_kv(1))
    first, _ = tier.get_many(names("a", "b"), load)
    assert tier.missing(names("a", "b", "c")) == names("c")
    again, held = tier.get_many(names("a", "b"), load)
    assert held == {b"a", b"b"}
    assert all(again[key] is first[key] for key in first)
    assert (tier.use().entries, tier.use().bytes) == (budget, budget * kv.nbytes)
    tier.drop(names("a"))  # the store overwrote it
    assert tier.get_many(names("a"), load)[0][b"a"] is not first[b"a"]
    assert load.asked == [names("a", "b"), names("a")]


def test_budgets_may_change_and_what_there_is_not_is_left_out(kv):
    tier = MemoryTier(5 * kv.nbytes)
    load = Loader(lambda _: make_kv(1))
    tier.get_many(names("a", "b", "c"), load)
    tier.resize(kv.nbytes)
    assert tier.get_many(names("c"), load)[1] == {b"c"}
    tier.resize(0)
    assert tier.use().entries == tier.use().bytes == 0
    assert tier.get_many(names("c"), load)[1] == set()
    assert tier.use().evictions == 3  # what was never admitted was not evicted
    tier = MemoryTier(1 << 20)
    found, held = tier.get_many(names("a", "b"), lambda keys: {b"b": make_kv(1)})
    assert (list(found), held, tier.use().entries) == (names("b"), set(), 1)


def test_two_threads_load_the_same_key_once():
    begun, go_on = threading.Event(), threading.Event()
    asked: list[bytes] = []

    def slow(keys: Sequence[bytes]) -> dict[bytes, ChunkKV]:
        asked.extend(keys)
        begun.set()
        assert go_on.wait(timeout=600)
        return {key: make_kv(1) for key in keys}

    def quick(keys: Sequence[bytes]) -> dict[bytes, ChunkKV]:
        asked.extend(keys)
        go_on.set()  # only now may the first thread end: b was loaded while a was still loading
        return {key: make_kv(1) for key in keys}

    tier = MemoryTier(1 << 20)
    results: dict[str, tuple[dict[bytes, ChunkKV], set[bytes]]] = {}
    first = threading.Thread(target=lambda: results.update(first=tier.get_many(names("a"), slow)))
    first.start()
    assert begun.wait(timeout=600)
    result, held = tier.get_many(names("a", "b"), quick)
    first.join()
    assert asked == names("a", "b")
    assert held == {b"a"}
    assert result[b"a"] is results["first"][0][b"a"]
    assert (tier.use().hits, tier.use().misses) == (1, 2)


def test_a_failed_load_is_tried_by_those_who_waited():
    begun, go_on = threading.Event(), threading.Event()
    errors: list[Exception] = []

    def broken(keys: Sequence[bytes]) -> dict[bytes, ChunkKV]:
        begun.set()
        assert go_on.wait(timeout=600)
        raise StoreError("the disk is gone")

    def first() -> None:
        try:
            tier.get_many(names("a"), broken)
        except StoreError as error:
            errors.append(error)

    tier = MemoryTier(1 << 20)
    thread = threading.Thread(target=first)
    thread.start()
    assert begun.wait(timeout=600)
    threading.Timer(0.05, go_on.set).start()
    load = Loader(lambda _: make_kv(1))
    found, held = tier.get_many(names("a"), load)
    thread.join()
    assert (list(found), held, len(errors)) == (names("a"), set(), 1)
    assert tier.get_many(names("a"), load)[1] == {b"a"}
    assert load.asked == [names("a")]


def test_an_interrupt_at_the_end_of_a_load_leaves_nobody_waiting(kv, monkeypatch):
    """Neither a thread that waits for one of its keys now, nor a later request."""
    waits = threading.Event()
    wait, insert = cache._PendingLoad.wait, MemoryTier._insert
    results: list[set[bytes]] = []

    def waiting(self: cache._PendingLoad) -> ChunkKV | None:
        waits.set()
        return wait(self)

    def interrupted(self: MemoryTier, key: bytes, kv: ChunkKV) -> None:
        monkeypatch.setattr(MemoryTier, "_insert", insert)
        raise KeyboardInterrupt

    def ask() -> None:
        results.append(set(tier.get_many(names("a", "b"), Loader(lambda _: kv))[0]))

    def load(keys: Sequence[bytes]) -> dict[bytes, ChunkKV]:
        others[0].start()
        assert waits.wait(timeout=600)
        return dict.fromkeys(keys, kv)

    monkeypatch.setattr(cache._PendingLoad, "wait", waiting)
    monkeypatch.setattr(MemoryTier, "_insert", interrupted)
    tier = MemoryTier(1 << 20)
    others = [threading.Thread(target=ask, daemon=True) for _ in range(2)]
    with pytest.raises(KeyboardInterrupt):
        tier.get_many(names("a", "b"), load)
    others[1].start()
    for other in others:
        other.join(60)
    assert results == [set(names("a", "b"))] * 2
    assert (tier.use().entries, tier.use().bytes) == (2, 2 * kv.nbytes)


def test_a_drop_reaches_entries_and_loads_under_way():
    tier = MemoryTier(1 << 20)
    tier.get_many(names("a"), Loader(lambda _: make_kv(1)))

    def overtaken(keys: Sequence[bytes]) -> dict[bytes, ChunkKV]:
        tier.drop(names("a", "b", "c"))  # the store deletes b after it was read
        return {key: make_kv(1) for key in keys}

    found, _ = tier.get_many(names("b"), overtaken)
    assert list(found) == names("b")
    assert (tier.use().entries, tier.use().drops) == (0, 1)


def of_store(store: Store, identities: Iterable[KVIdentity]) -> Callable[[Sequence[bytes]], Mapping[bytes, ChunkKV]]:
    by_key = {identity.key(): identity for identity in identities}
    return lambda keys: {of.key(): kv for of, kv in store.get_many([by_key[key] for key in keys]).items()}


def test_what_the_store_deletes_or_writes_again_is_dropped(store):
    write(store, "a", (1,), (2,))
    write(store, "b", (2,), (3,))
    identities = [identity(n) for n in (1, 2, 3)]
    load = of_store(store, identities)
    tier = store.memory(budget=1 << 20)
    tier.get_many([of.key() for of in identities], load)

    def remaining() -> list[int]:
        return [n for n, of in zip((1, 2, 3), identities, strict=True) if of.key() in tier._entries]

    assert remaining() == [1, 2, 3]
    store.delete_document("a")  # b still needs 2
    assert remaining() == [2, 3]
    put_kv(store, identity(2), make_kv(1, seed=9), "b#0")
    assert remaining() == [3]
    write(store, "b", (4,))
    assert remaining() == []
    assert tier.use().drops == 3


def test_all_stores_of_a_path_share_a_tier_for_each_device(tmp_path):
    with Store.create(tmp_path / "index") as store, Store.create(tmp_path / "other") as other:
        with Store.open(tmp_path / "index") as same:
            assert same.memory() is store.memory()
            assert store.memory("cuda:0") is not store.memory()
        assert other.memory() is not store.memory()
        store.memory(budget=1 << 20).get_many(names("a"), Loader(lambda _: make_kv(1)))
    with Store.open(tmp_path / "index") as again:
        assert again.memory().use().entries == 0  # the tier ended with the last store


def test_what_another_process_deleted_is_dropped_at_the_next_look(store):
    write(store, "a", (1,))
    write(store, "b", (2,))
    tier = store.memory(budget=1 << 20)
    tier.get_many([identity(n).key() for n in (1, 2)], of_store(store, [identity(1), identity(2)]))

    def delete() -> None:
        with Store.open(store.directory.parent) as own:
            assert own.memory().use().entries == 0
            assert own.delete_document("a")

    assert in_child(delete) == 0
    assert tier.use().entries == 2
    assert store.memory().use().entries == 1
    assert list(tier._entries) == [identity(2).key()]


def test_a_forked_child_begins_with_an_empty_tier(store):
    """A thread that the child does not have may hold the parent's lock, so the child must never touch that tier."""
    tier = store.memory(budget=1 << 20)
    tier.get_many(names("a"), Loader(lambda _: make_kv(1)))

    def look() -> None:
        with pytest.raises(StoreError, match="before a fork"):
            store.memory()
        with Store.open(store.directory.parent) as own:
            assert own.memory(budget=1).use().entries == 0

    with tier._lock:
        assert in_child(look) == 0
    assert store.memory().use().entries == 1
