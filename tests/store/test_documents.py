"""Vectors are added, changed and deleted with their chunk, by kind, bit for bit."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from storekit import chunk, vectors_of, write

from ragkv.errors import CorruptStoreError, StoreError
from ragkv.store import ChunkVectors, Store
from ragkv.types import Chunk, Document


def same(left: Any, right: Any) -> bool:
    if isinstance(right, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    return bool(left == right)


@pytest.mark.parametrize("kind", ["dense", "sparse", "colbert"])
def test_vectors_are_read_as_they_were_written(store, kind):
    chunks = write(store, "a", (1, 2), (3,), ()) + write(store, "b", *((n,) for n in range(80)))
    read = dict(store.vectors(kind))
    assert list(read) == [chunk.chunk_id for chunk in store.chunks()]
    for one in chunks:
        assert same(read[one.chunk_id], getattr(vectors_of(one), kind))
    some = store.vector_many(kind, ["b#7", "none", "a#1"])
    assert list(some) == ["b#7", "a#1"]
    assert same(some["a#1"], read["a#1"])


def one_chunk(store: Store, chunk: Chunk, vectors: dict[str, ChunkVectors]) -> None:
    document = Document(document_id=chunk.document_id, source="s", content_hash="0")
    store.write_document(document, "t", [chunk], recipe="r", references={}, vectors=vectors)


def test_long_values_are_cut_and_come_whole(store):
    of = chunk("a", 0, (1,))
    colbert = np.random.default_rng(0).random((1500, 512)).astype(np.float16)
    one_chunk(store, of, {of.chunk_id: ChunkVectors(colbert=colbert)})
    assert same(store.vector_many("colbert", [of.chunk_id])[of.chunk_id], colbert)
    assert dict(store.vectors("dense")) == {}
    with store._live().read() as txn:
        assert txn.count("vectors") == 2


def test_new_vectors_of_the_same_chunks_advance_the_generation(store):
    of = chunk("a", 0, (1,))
    for dense, generation in ((1.0, 1), (1.0, 1), (2.0, 2)):
        one_chunk(store, of, {of.chunk_id: ChunkVectors(dense=np.array([dense], np.float32))})
        assert store.generation == generation
    one_chunk(store, of, {})
    assert store.generation == 3
    assert dict(store.vectors("dense")) == {}


def test_vectors_that_cannot_be_are_refused(store):
    with pytest.raises(ValueError, match="float64"):
        ChunkVectors(dense=np.zeros(3))
    with pytest.raises(ValueError, match="2 axes"):
        ChunkVectors(colbert=np.zeros(3, np.float32))
    with pytest.raises(StoreError, match="does not have"):
        one_chunk(store, chunk("a", 0, (1,)), {"a#1": ChunkVectors()})
    assert store.document("a") is None


@pytest.mark.parametrize("kind", ["dense", "sparse", "colbert"])
def test_damage_is_an_error_that_says_what_to_do(store, kind):
    write(store, "a", (1, 2))

    def damage(txn: Any) -> None:
        [(key, value)] = list(txn.scan("vectors", kind[:1].encode()))
        changed = bytearray(value)
        changed[3] ^= 4
        txn.put("vectors", key, bytes(changed))

    store._live().write(damage)
    with pytest.raises(CorruptStoreError, match="ragkv repair"):
        store.vector_many(kind, ["a#0"])
    with pytest.raises(CorruptStoreError, match="ragkv repair"):
        list(store.vectors(kind))


def test_what_could_not_be_read_is_not_written(store):
    document = Document(document_id="d", source="d", content_hash="")
    plain = Chunk(chunk_id="a", document_id="d", ordinal=0, text="Mill", token_ids=(1,), start=0, end=4)
    for place, bad in (
        (document, replace(plain, chunk_id="")),
        (document, replace(plain, page=-1)),
        (document, replace(plain, page=1 << 48)),
        (replace(document, metadata={"year": 1907}), plain),
    ):
        with pytest.raises(StoreError, match="'d' cannot be stored, because it could not be read: "):
            store.write_document(place, "Mill", [bad], recipe="", references={})
    assert store.empty
    store.write_document(document, "Mill", [plain], recipe="", references={})
    assert store.maintenance.verify().ok
