"""KV layer by layer, where it lies, and many at once: the right tensors, nothing read for nothing, nothing mixed."""

import logging
import threading
from dataclasses import replace

import pytest
import torch
from package import run_fresh
from storekit import equal, identity, make_kv

from ragkv.attention.kv import ChunkKV
from ragkv.errors import KVLostError, StoreError
from ragkv.store import Q8, Half, Raw, Store, Zstd, reader, record
from ragkv.store.tables import Transaction

TOKENS = 1100  # with 4 heads of 96: keys and values of a layer apart, 825 KiB each


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Indices of the segments that were fetched."""
    fetched: list[int] = []
    fetch = Transaction.segment

    def counted(self: Transaction, key: bytes, index: int) -> memoryview | None:
        fetched.append(index)
        return fetch(self, key, index)

    monkeypatch.setattr(Transaction, "segment", counted)
    return fetched


@pytest.fixture
def long() -> ChunkKV:
    return make_kv(TOKENS, kv_heads=4, head_dim=96, layers=3, encoded_at=5)


def flip(store: Store, key: bytes, index: int) -> None:
    """One bit of a segment, as a bad disk would."""

    def apply(txn: Transaction) -> None:
        name = key + index.to_bytes(4, "big")
        value = bytearray(txn.get("segments", name) or b"")
        value[len(value) // 2] ^= 1
        txn.put("segments", name, bytes(value))

    store._live().write(apply)


@pytest.mark.parametrize("codec", [Raw(), Zstd()])
def test_a_layer_is_read_alone(tmp_path, codec, long, segments):
    of = identity(*range(TOKENS))
    with Store.create(tmp_path, codec=codec) as store:
        store.stage_kv([(of, long)])
        opened = store.open_kv(of)
        assert opened is not None
        assert (opened.layers, opened.tokens, opened.dtype, opened.encoded_at) == (3, TOKENS, torch.bfloat16, 5)
        assert segments == []
        for layer, expected in ((1, [2, 3]), (0, [0, 1]), (2, [4, 5])):
            segments.clear()
            keys, values = opened.layer(layer)
            assert segments == expected
            assert torch.equal(keys, long.keys[layer])
            assert torch.equal(values, long.values[layer])
            assert store._live()._map.env.readers() == "(no active readers)\n"
        with pytest.raises(IndexError, match="no layer 3"):
            opened.layer(3)


def test_a_record_that_changes_between_two_layers_is_noticed(store):
    of = identity(1, 2, 3)

    def opened() -> reader.KVReader:
        store.stage_kv([(of, make_kv(3))])
        found = store.open_kv(of)
        assert found is not None
        found.layer(0)
        return found

    replaced = opened()
    store.stage_kv([(of, make_kv(3, seed=1))])
    with pytest.raises(KVLostError, match="deleted or replaced"):
        replaced.layer(1)
    deleted = opened()
    store._live().write(lambda txn: txn.drop_record(of.key()))
    with pytest.raises(KVLostError, match="deleted or replaced"):
        deleted.layer(1)
    damaged = opened()
    flip(store, of.key(), 1)
    damaged.layer(0)
    with pytest.raises(KVLostError, match="checksum of segment 1"):
        damaged.layer(1)
    unchanged = opened()
    store.stage_kv([(of, make_kv(3))])  # the same bytes again
    assert torch.equal(unchanged.layer(1)[0], make_kv(3).keys[1])
    assert store.open_kv(identity(9)) is None


def test_many_come_from_one_snapshot_and_bad_ones_stay_out(store, caplog):
    kvs = {identity(n, n + 1): make_kv(2, seed=n) for n in range(5)}
    store.stage_kv(kvs.items())
    bad, gone = identity(1, 2), identity(77)
    flip(store, bad.key(), 1)
    caplog.set_level(logging.WARNING)
    found = store.get_many([*kvs, gone, *kvs])
    assert list(found) == [of for of in kvs if of != bad]
    assert all(equal(kv, kvs[of]) for of, kv in found.items())
    assert "checksum of segment 1" in caplog.text


@pytest.mark.parametrize("codec", [Raw(), Zstd()])
def test_large_reads_are_shared_among_threads(tmp_path, codec, long, monkeypatch):
    monkeypatch.setattr(reader, "DECODE_BYTES", 1 << 20)
    monkeypatch.setattr(record, "_cores", lambda: 3)
    workers = set()
    decode = reader.decode_segments

    def noted(*arguments: object, **options: object) -> bool:
        workers.add(threading.current_thread().name)
        gate.wait(timeout=600)  # nobody goes on before two threads are at work
        return decode(*arguments, **options)  # type: ignore[arg-type]

    gate = threading.Barrier(2)
    monkeypatch.setattr(reader, "decode_segments", noted)
    identities = [identity(n, *range(TOKENS - 1)) for n in range(2)]
    with Store.create(tmp_path, codec=codec) as store:
        store.stage_kv((of, long) for of in identities)
        found = store.get_many(identities)
        assert len(workers) >= 2
        assert all(equal(found[of], long) for of in identities)
        monkeypatch.setattr(reader, "decode_segments", decode)
        flip(store, identities[0].key(), 5)
        assert list(store.get_many(identities)) == identities[1:]


def test_what_a_thread_raises_reaches_the_caller_when_all_have_ended(monkeypatch):
    monkeypatch.setattr(record, "_cores", lambda: 4)
    done = []

    def fail() -> None:
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        record.share([lambda: done.append(1), fail, lambda: done.append(2)])
    record.share([lambda n=n: done.append(n) for n in range(100)])  # type: ignore[misc]
    assert set(range(100)) <= set(done)


def test_mapped_tensors_lie_in_the_map(store, long):
    of = identity(*range(TOKENS))
    store.stage_kv([(of, long)])
    with store._live().read() as txn:
        places = [memory_of(txn.segment(of.key(), index)) for index in range(6)]
    with store.mapped_kv(of) as kv:
        assert kv is not None
        assert equal(kv, long)
        pairs = [t for pair in zip(kv.keys, kv.values, strict=True) for t in pair]
        assert [(t.data_ptr(), t.nbytes) for t in pairs] == places  # so no byte was copied
    assert all(t.numel() == 0 for t in pairs)  # a late use is an error, and no wrong number
    with store.mapped_kv(identity(5)) as missing:
        assert missing is None
    empty = identity()
    store.stage_kv([(empty, make_kv(0))])
    with store.mapped_kv(empty) as kv:
        assert equal(kv, make_kv(0))


def memory_of(view: memoryview | None) -> tuple[int, int]:
    import numpy as np

    assert view is not None
    return np.frombuffer(view, np.uint8).__array_interface__["data"][0], len(view)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("codec", [Raw(), Zstd()])
@pytest.mark.parametrize("shape", [(3, 2, 4, 1), (6000, 1, 96, 2), (1, 1, 1, 3)], ids=str)
def test_mapped_kv_is_right_wherever_it_lies(tmp_path, codec, dtype, shape):
    """Small values lie unaligned between others, long heads in several segments: those are copied."""
    tokens, kv_heads, head_dim, layers = shape
    kvs = {}
    for n in range(4):
        of = identity(*range(n, n + tokens), model="m" * n)
        kvs[of] = make_kv(tokens, kv_heads=kv_heads, head_dim=head_dim, layers=layers, dtype=dtype, seed=n)
    with Store.create(tmp_path, codec=codec) as store:
        store.stage_kv(kvs.items())
        for of, kv in kvs.items():
            with store.mapped_kv(of) as mapped:
                assert equal(mapped, kv)
        flip(store, of.key(), 0)
        with store.mapped_kv(of) as mapped:
            assert mapped is None


def test_an_error_in_the_block_is_the_blocks_own_and_ends_the_snapshot(store):
    store.stage_kv([(identity(1), make_kv(1))])
    with pytest.raises(OSError, match="mine") as caught, store.mapped_kv(identity(1)):
        raise OSError("mine")
    assert not isinstance(caught.value, StoreError)
    assert store._live()._map.env.readers() == "(no active readers)\n"


def test_kv_goes_to_a_device_straight_from_the_map(store, monkeypatch):
    """The meta device has shapes and no memory, which is enough to see that no buffer is made on the way."""
    monkeypatch.setattr(reader, "new_buffer", lambda nbytes: pytest.fail(f"a buffer of {nbytes} bytes"))
    store.stage_kv([(identity(1, 2), make_kv(2))])
    found = store.get_many([identity(1, 2), identity(3)], device=torch.device("meta"))
    assert list(found) == [identity(1, 2)]
    kv = found[identity(1, 2)]
    assert {(t.device.type, t.shape, t.dtype) for t in (*kv.keys, *kv.values)} == {("meta", (2, 2, 4), torch.bfloat16)}


def test_reading_works_in_a_forked_child_and_leaves_quietly(tmp_path):
    """Threads and their locks do not cross a fork; buffers are given back while the interpreter ends."""
    code = """
import os, sys, torch
from ragkv.attention.kv import ChunkKV
from ragkv.store import KVIdentity, Store, reader, record
from ragkv.types import Encoding
torch.set_num_threads(1)  # OpenMP's own threads do not cross a fork either
reader.DECODE_BYTES = 1 << 20
record._cores = lambda: 3
kv = ChunkKV(keys=(torch.ones(4, 4096, 128),), values=(torch.ones(4, 4096, 128),))
of = KVIdentity(model="m", encoding=Encoding.STANDALONE, chunk_ids=tuple(range(4096)))
with Store.create(sys.argv[1]) as store:
    store.stage_kv([(of, kv)])
    held = store.get_kv(of)
    with record._lock:  # as another thread of the parent would
        child = os.fork()
    if not child:
        torch.set_num_threads(1)  # before two threads use what the fork has of torch's pool
        with Store.open(sys.argv[1]) as again:
            os._exit(0 if torch.equal(again.get_kv(of).keys[0], kv.keys[0]) else 1)
    print(os.waitpid(child, 0)[1])
"""
    assert run_fresh(code, tmp_path) == ("0\n", "")


@pytest.mark.parametrize(
    ("codec", "dtype", "packed", "kept"),
    [
        (Half(), torch.float32, torch.float16, [True, False, False]),
        (Q8(), torch.float32, torch.int8, [True, True, False]),
        (Q8(), torch.bfloat16, torch.int8, [True, True, False]),
    ],
    ids=str,
)
def test_numbers_stay_packed_in_memory_until_they_are_taken(tmp_path, codec, dtype, packed, kept):
    """The same numbers as decoded at once, in less memory; what `half` has scaled, or has NaN, is decoded at once."""
    kvs = {identity(n, *range(4)): make_kv(5, dtype=dtype) for n in (1, 2, 3)}
    plain, scaled, odd = kvs
    kvs[scaled] = replace(kvs[scaled], keys=tuple(t * 1e6 for t in kvs[scaled].keys))
    kvs[odd].values[1][0, 0, 0] = torch.nan
    with Store.create(tmp_path, codec=codec) as store:
        store.stage_kv(kvs.items())
        found = store.get_many(kvs)
        for of, kv in found.items():
            assert kv.dtype == dtype
            assert kv.shape == kvs[of].shape
            reader = store.open_kv(of)
            for layer in range(kv.layers):
                for one, other in zip((kv.keys[layer], kv.values[layer]), reader.layer(layer), strict=True):
                    assert torch.equal(one.nan_to_num(), other.nan_to_num())
            _, again = record.round_trip(kvs[of], of, codec)
            assert again.packed == kv.packed
            assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(again.keys, kv.keys, strict=True))
    small = found[plain]
    assert [kv.packed for kv in found.values()] == kept
    rows = sum(t.shape[0] * t.shape[1] for t in small.wide().tensors) if packed == torch.int8 else 0
    numbers = sum(t.numel() for t in small.wide().tensors)
    assert small.nbytes == numbers * packed.itemsize + 2 * rows
    assert [t.dtype for t in small.tensors] == [packed] * len(small.tensors)
    assert record.encode_record(small, plain, codec) == record.encode_record(kvs[plain], plain, codec)
    for change in (lambda kv: kv.head(2), lambda kv: kv.part(1, 3), lambda kv: kv.to(torch.device("cpu"), copy=True)):
        one, other = change(small), change(small.wide())
        assert all(torch.equal(a, b) for a, b in zip(one.keys, other.keys, strict=True))
