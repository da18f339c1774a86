"""KV read in batches: the right tensors, nothing mixed up, by the kernel and in Python, for host and device."""

import ctypes
import logging
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xxhash
from package import run_fresh
from storekit import equal, identity, make_kv

from ragkv import attention
from ragkv.attention.kv import ChunkKV, CopyStream
from ragkv.attention.pages import PagePool
from ragkv.store import Q8, Half, Raw, Store, Zstd, reader, record
from ragkv.store.codecs import DamagedError
from ragkv.store.tables import Transaction

TOKENS = 1100  # with 4 heads of 96, keys and values of a layer are separate segments of 825 KiB


@pytest.fixture
def long() -> ChunkKV:
    return make_kv(TOKENS, kv_heads=4, head_dim=96, layers=3, encoded_at=5)


def flip(store: Store, key: bytes, index: int) -> None:
    """Flip one bit of a segment, as a bad disk would."""

    def apply(txn: Transaction) -> None:
        name = key + index.to_bytes(4, "big")
        value = bytearray(txn.get("segments", name) or b"")
        value[len(value) // 2] ^= 1
        txn.put("segments", name, bytes(value))

    store._live().write(apply)


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
    monkeypatch.setattr(record, "cores", lambda: 3)
    workers = set()
    decode = reader._Loading._decode

    def noted(*arguments: object) -> None:
        workers.add(threading.current_thread().name)
        gate.wait(timeout=600)  # continue only when two threads are at work
        decode(*arguments)  # type: ignore[arg-type]

    gate = threading.Barrier(2)
    monkeypatch.setattr(reader._Loading, "_decode", noted)
    identities = [identity(n, *range(TOKENS - 1)) for n in range(2)]
    with Store.create(tmp_path, codec=codec) as store:
        store.stage_kv((of, long) for of in identities)
        found = store.get_many(identities)
        assert len(workers) >= 2
        assert all(equal(found[of], long) for of in identities)
        monkeypatch.setattr(reader._Loading, "_decode", decode)
        flip(store, identities[0].key(), 5)
        assert list(store.get_many(identities)) == identities[1:]


def test_what_a_thread_raises_reaches_the_caller_when_all_have_ended(monkeypatch):
    monkeypatch.setattr(record, "cores", lambda: 4)
    done = []

    def fail() -> None:
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        record.share([lambda: done.append(1), fail, lambda: done.append(2)])
    record.share([lambda n=n: done.append(n) for n in range(100)])  # type: ignore[misc]
    assert set(range(100)) <= set(done)


def test_an_interrupted_caller_waits_for_those_who_read():
    """The other threads may be reading the map, which the caller closes next; work that has not begun is skipped."""
    code = """
import signal, sys, threading, time
from ragkv.store import record
record.cores = lambda: 2
main, helped, left, ended = threading.main_thread(), threading.Event(), threading.Event(), []

def still():
    frame = sys._current_frames()[main.ident]
    return frame, frame.f_lasti

def task():
    if threading.current_thread() is main:
        helped.wait(600)
        return
    helped.set()
    seen = 0
    while seen < 50:  # until the caller waits, which it does neither here nor on its way there
        before = still()
        time.sleep(0.001)
        seen = seen + 1 if before == still() and before[0].f_code is not task.__code__ else 0
    signal.pthread_kill(main.ident, signal.SIGINT)
    ended.append(not left.wait(0.2))

try:
    record.share([task, task])
except KeyboardInterrupt:
    print("interrupted", ended)
left.set()
"""
    assert run_fresh(code) == ("interrupted [True]\n", "")


def test_those_who_began_are_waited_for_though_no_more_threads_start(monkeypatch):
    """The pool accepts the work, and only then fails to start another thread for it."""
    begun, left, ended = threading.Event(), threading.Event(), []

    def task() -> None:
        if threading.current_thread() is caller:
            begun.wait(600)
        else:
            begun.set()
            ended.append(not left.wait(0.2))

    def submit(work) -> None:
        pool.submit(work)
        raise RuntimeError("can't start new thread")

    caller = threading.current_thread()
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(record, "cores", lambda: 3)
        monkeypatch.setattr(record, "_pool", SimpleNamespace(submit=submit))
        record.share([task, task])
        left.set()
    assert ended == [True]


@pytest.fixture(params=[True, False], ids=["kernel", "python"])
def kernel(request, monkeypatch):
    """Whether the kernel reads KV that is copied as stored; records its calls and their results."""
    calls = []
    if request.param:
        module = pytest.importorskip("ragkv.store.read_kernel")
        copy = module.copy_checked
        monkeypatch.setattr(module, "copy_checked", lambda *given: calls.append(copy(*given)) or calls[-1])
    else:
        monkeypatch.setattr(reader, "kernel_module", lambda _: None)
    return calls if request.param else None


@pytest.mark.parametrize(
    ("codec", "dtype", "copied"),
    [
        (Raw(), torch.bfloat16, True),
        (Half(), torch.float32, True),
        (Q8(), torch.bfloat16, True),
        (Zstd(), torch.bfloat16, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [(1, 2, 4), (TOKENS, 4, 96), (TOKENS, 1, 512)], ids=str)
def test_every_flipped_bit_is_seen_by_both_ways_to_read(tmp_path, codec, dtype, copied, size, kernel, caplog):
    """Segments of a layer, of its keys, and of some of their tokens; a record is copied completely or not at all."""
    tokens, heads, width = size
    kv = make_kv(tokens, kv_heads=heads, head_dim=width, dtype=dtype, layers=3)
    first, other = identity(*range(tokens)), identity(*range(1, tokens + 1))
    with Store.create(tmp_path, codec=codec) as store:
        store.stage_kv([(first, kv), (other, kv)])
        result = store.get_many([first, other])
        assert kernel is None or kernel == [True] * (len(kernel) if copied else 0)
        assert kernel is None or bool(kernel) == copied
        _, expected = record.round_trip(kv, first, codec)
        assert all(equal(loaded, expected) for loaded in result.values())
        with store._live().read() as txn:
            segments = sum(1 for _ in txn.scan("segments", first.key()))
        for index in {0, segments // 2, segments - 1}:
            caplog.clear()
            flip(store, first.key(), index)
            assert list(store.get_many([first, other])) == [other]
            assert f"the checksum of segment {index} does not match" in caplog.text
            flip(store, first.key(), index)
        assert list(store.get_many([first, other])) == [first, other]


def test_the_kernel_copies_nothing_beside_its_target():
    kernel = pytest.importorskip("ragkv.store.read_kernel")
    rng = np.random.default_rng(3)
    for parts in ([0], [1], [7, 0, 260], [4096, 3], [1 << 20, 17, 5]):
        memory = [rng.integers(0, 256, n + 2, np.uint8)[1:-1] for n in parts]
        segments = [(part, xxhash.xxh3_64_intdigest(part), [part, part[: part.size // 2]]) for part in memory]
        wanted = np.concatenate([item for *_, held in segments for item in held])
        around = np.full(wanted.size + 64, 7, np.uint8)
        out = around[32:-32]
        assert kernel.copy_checked(segments, out)
        assert np.array_equal(out, wanted)
        assert (around[:32] == 7).all()
        assert (around[-32:] == 7).all()
        assert not kernel.copy_checked(segments, around[32:-31])
        for wrong in range(len(segments)):
            digests = [digest + (n == wrong) for n, (_, digest, _) in enumerate(segments)]
            damaged = [(held, digest, item) for digest, (held, _, item) in zip(digests, segments, strict=True)]
            assert not kernel.copy_checked(damaged, out)


@pytest.mark.parametrize("exports", [(), ("XXH3_64bits",), ("XXH3_64bits_dispatch",)])
def test_without_the_right_function_of_xxhash_there_is_no_kernel(exports, monkeypatch):
    kernel = pytest.importorskip("ragkv.store.read_kernel")
    real = ctypes.CDLL(xxhash._xxhash.__file__)
    if not all(hasattr(real, name) for name in exports):
        pytest.skip("xxhash has no dispatch on this processor")
    wrong = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t)(lambda _data, _nbytes: 5)
    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(**{name: getattr(real, name) for name in exports}))
        if exports:
            assert kernel._exported()
        else:
            with pytest.raises(ImportError, match="does not export"):
                kernel._exported()
        patch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(XXH3_64bits=wrong))
        with pytest.raises(ImportError, match="another function"):
            kernel._exported()


@pytest.mark.parametrize("codec", [Half(), Q8()], ids=str)
def test_a_payload_of_fewer_numbers_than_its_record_has_is_no_hit(tmp_path, codec, kernel, caplog):
    """The checksum is right, so the author of the store wrote it like this."""
    kv, of = make_kv(6, dtype=torch.float32), identity(*range(6))
    short = make_kv(5, dtype=torch.float32)
    kvs, less = (record.encode_record(each, identity(*range(each.tokens)), codec) for each in (kv, short))
    manifest, payload = record.Manifest.parse(kvs.manifest), less.segments[1]
    segments = list(manifest.segments)
    segments[1] = segments[1]._replace(stored=len(payload), digest=xxhash.xxh3_64_intdigest(payload))
    lying = replace(manifest, segments=tuple(segments))
    payloads = (kvs.segments[0], payload, *kvs.segments[2:])
    with pytest.raises(DamagedError, match="bytes, not"):
        record.decode_record(lying, payloads.__getitem__)
    with Store.create(tmp_path, codec=codec) as store:
        store.stage_kv([(of, kv)])
        store._live().write(lambda txn: txn.put_record(replace(kvs, manifest=lying.pack(), segments=payloads)))
        assert store.get_kv(of) is None
        assert "bytes, not" in caplog.text
    assert not kernel


@pytest.mark.parametrize("codec", [Raw(), Half(), Q8()], ids=str)
def test_segments_that_are_right_only_together_are_no_hit(tmp_path, codec, kernel, caplog):
    """Two segments of different lengths are swapped together with their checksums."""
    small, large = (make_kv(6, kv_heads=heads, layers=1, dtype=torch.float32) for heads in (1, 3))
    kv, of = ChunkKV(keys=small.keys + large.keys, values=small.values + large.values), identity(*range(6))
    kvs = record.encode_record(kv, of, codec)
    manifest = record.Manifest.parse(kvs.manifest)
    one, other = manifest.segments
    segments = (
        one._replace(stored=other.stored, digest=other.digest),
        other._replace(stored=one.stored, digest=one.digest),
    )
    swapped = replace(kvs, manifest=replace(manifest, segments=segments).pack(), segments=kvs.segments[::-1])
    with Store.create(tmp_path, codec=codec) as store:
        store.stage_kv([(of, kv)])
        assert store.get_kv(of) is not None
        store._live().write(lambda txn: txn.put_record(swapped))
        assert store.get_kv(of) is None
        assert "bytes, not" in caplog.text
        with store._live().read() as txn, pytest.raises(DamagedError, match="bytes, not"):
            record.check_payloads(record.Manifest.parse(swapped.manifest), partial(txn.segment, of.key()))


@pytest.mark.parametrize("error", [struct.error("x"), IndexError("x"), TypeError("x")], ids=repr)
def test_what_another_packages_codec_raises_is_no_hit(tmp_path, error, kernel, monkeypatch, caplog):
    class Theirs(Half):
        def parts(self, buf):
            raise error

    of = identity(1, 2, 3)
    with Store.create(tmp_path, codec=Half()) as store:
        store.stage_kv([(of, make_kv(3, dtype=torch.float32))])
        monkeypatch.setattr(reader, "codec_from_config", lambda _: Theirs())
        assert store.get_kv(of) is None
        assert "segment 0 cannot be decoded" in caplog.text
    assert not kernel


def test_what_one_thread_cannot_pack_is_not_forgotten_by_another(tmp_path, monkeypatch):
    """The second run of a record ends while the first is being decoded, and contains numbers that cannot be packed."""
    seen, tasks, decode = [], reader._Loading.tasks, reader.decode_segments

    def noted(self):
        seen.append(self)
        return tasks(self)

    def slow(manifest, codec, run, *arguments, packing=None):
        end = time.monotonic() + 60
        while packing and run.start == 0 and not seen[0].redo and time.monotonic() < end:
            time.sleep(0.001)
        return decode(manifest, codec, run, *arguments, packing=packing)

    monkeypatch.setattr(reader, "DECODE_BYTES", 1 << 20)
    monkeypatch.setattr(record, "cores", lambda: 2)
    monkeypatch.setattr(reader, "kernel_module", lambda _: None)
    monkeypatch.setattr(reader._Loading, "tasks", noted)
    monkeypatch.setattr(reader, "decode_segments", slow)
    kv, of = make_kv(TOKENS, kv_heads=4, head_dim=96), identity(*range(TOKENS))
    kv.values[1][3, -1, 5] = torch.nan
    with Store.create(tmp_path, codec=Q8()) as store:
        store.stage_kv([(of, kv)])
        found = store.get_kv(of)
        assert len(seen) == 2  # the second time without packing
        _, expected = record.round_trip(kv, of, Q8())
        assert equal(found, expected)


class DelayedCopies(CopyStream):
    """Copies that happen only when they are waited for: until then the data is zeros."""

    def __init__(self, did):
        super().__init__(torch.device("meta"))
        self.did, self._sent = did, []

    def send(self, tensor):
        self.did.append("send")
        self._sent.append((torch.zeros_like(tensor), tensor))
        return self._sent[-1][0]

    def wait(self):
        for there, tensor in self._sent:
            there.copy_(tensor)


@pytest.mark.parametrize("codec", [Raw(), Zstd(), Q8(), Half()], ids=str)
def test_a_record_crosses_to_a_device_while_the_next_one_is_read(tmp_path, codec, monkeypatch):
    did, decode = [], reader._Loading._decode
    copies = DelayedCopies(did)
    monkeypatch.setattr(attention.kv, "copy_stream", lambda _: copies)
    monkeypatch.setattr(record, "cores", lambda: 1)
    monkeypatch.setattr(reader._Loading, "_decode", lambda *given: did.append("read") or decode(*given))
    kvs = {identity(n, *range(4)): make_kv(5, seed=n, dtype=torch.float32) for n in range(4)}
    bad, odd = list(kvs)[1:3]
    kvs[odd].keys[0][0, 0, 0] = torch.nan  # cannot be packed: it is read again
    with Store.create(tmp_path, codec=codec) as store:
        store.stage_kv(kvs.items())
        expected = {of: store.get_kv(of) for of in kvs}
        flip(store, bad.key(), 0)
        did.clear()
        result = store.get_many(kvs, device=torch.device("meta"))
    first = ["read", "send"] * (codec.packing(kvs[odd].shape) is None)
    again = ["read", "send"] * (not first)
    assert did == ["read", "send", "read", *(first or ["read"]), "read", "send", *again]
    assert list(result) == [of for of in kvs if of != bad]
    for of, kv in result.items():
        assert kv.packed == expected[of].packed
        assert all(map(torch.equal, map(torch.nan_to_num, kv.tensors), map(torch.nan_to_num, expected[of].tensors)))


@pytest.mark.gpu
@pytest.mark.parametrize("codec", [Raw(), Q8()], ids=str)
def test_what_a_gpu_reads_while_it_computes_is_whole(tmp_path, codec):
    """Kernels run long after they are launched: their inputs are out of scope by then, and the memory may be reused."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda")
    kvs = {identity(n, *range(2047)): make_kv(2048, kv_heads=4, head_dim=128, seed=n) for n in range(6)}
    with Store.create(tmp_path, codec=codec) as store:
        store.stage_kv(kvs.items())
        wanted = {of: kv.wide().to(device) for of, kv in store.get_many(kvs).items()}
        same, copies = [], attention.kv.copy_stream(device)
        for n, some in enumerate((list(kvs)[:3], list(kvs)[3:]) * 6):
            with torch.cuda.stream(copies._stream if n % 4 < 2 else torch.cuda.current_stream()):
                torch.cuda._sleep(100_000_000)
            result, pages = store.get_many(some, device=device), PagePool(device, 1 << 30)
            torch.cuda._sleep(20_000_000)
            for of, kv in result.items():
                for made in (kv.wide(), pages.hold(kv).wide()):
                    same += [(a == b).all() for a, b in zip(made.tensors, wanted[of].tensors, strict=True)]
            del result, kv, made, pages
        assert all(map(bool, same))


def test_kv_of_a_model_on_several_devices_goes_layer_by_layer(store):
    store.stage_kv([(identity(1, 2), make_kv(2))])
    devices = (torch.device("cpu"), torch.device("meta"))
    found = store.get_many([identity(1, 2), identity(3)], device=devices)
    assert list(found) == [identity(1, 2)]
    kv = found[identity(1, 2)]
    assert [tuple(t.device for t in tensors) for tensors in (kv.keys, kv.values)] == [devices] * 2
    assert torch.equal(kv.keys[0], make_kv(2).keys[0])


def test_reading_works_in_a_forked_child_and_leaves_quietly(tmp_path):
    """Threads and their locks do not survive a fork; buffers are released while the interpreter shuts down."""
    code = """
import os, sys, torch
from ragkv.attention.kv import ChunkKV
from ragkv.store import KVIdentity, Store, reader, record
from ragkv.types import Encoding
torch.set_num_threads(1)  # OpenMP's own threads do not cross a fork either
reader.DECODE_BYTES = 1 << 20
record.cores = lambda: 3
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
    ("codec", "dtype", "packed", "remaining"),
    [
        (Half(), torch.float32, torch.float16, [True, False, False]),
        (Q8(), torch.float32, torch.int8, [True, True, False]),
        (Q8(), torch.bfloat16, torch.int8, [True, True, False]),
    ],
    ids=str,
)
def test_numbers_stay_packed_in_memory_until_they_are_taken(tmp_path, codec, dtype, packed, remaining):
    """The same numbers as if decoded at once, in less memory; scaled `half` numbers and NaN are decoded at once."""
    kvs = {identity(n, *range(4)): make_kv(5, dtype=dtype) for n in (1, 2, 3)}
    plain, scaled, odd = kvs
    kvs[scaled] = replace(kvs[scaled], keys=tuple(t * 1e6 for t in kvs[scaled].keys))
    kvs[odd].values[1][0, 0, 0] = torch.nan
    with Store.create(tmp_path, codec=codec) as store:
        store.stage_kv(kvs.items())
        result = store.get_many(kvs)
        for of, kv in result.items():
            assert kv.dtype == dtype
            assert kv.shape == kvs[of].shape
            _, again = record.round_trip(kvs[of], of, codec)
            assert again.packed == kv.packed
            assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(again.keys, kv.keys, strict=True))
    small = result[plain]
    assert [kv.packed for kv in result.values()] == remaining
    rows = sum(t.shape[0] * t.shape[1] for t in small.wide().tensors) if packed == torch.int8 else 0
    numbers = sum(t.numel() for t in small.wide().tensors)
    assert small.nbytes == numbers * packed.itemsize + 2 * rows
    assert [t.dtype for t in small.tensors] == [packed] * len(small.tensors)
    assert record.encode_record(small, plain, codec) == record.encode_record(kvs[plain], plain, codec)
    for change in (lambda kv: kv.head(2), lambda kv: kv.part(1, 3), lambda kv: kv.to(torch.device("cpu"), copy=True)):
        one, other = change(small), change(small.wide())
        assert all(torch.equal(a, b) for a, b in zip(one.keys, other.keys, strict=True))
