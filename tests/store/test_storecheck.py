"""The check that the crash tests rely on finds what is wrong, whatever it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from storecheck import problems

from ragkv.store import Store
from ragkv.store.format.row import pack_chunk, parse_chunk
from ragkv.store.transaction import Transaction, digest


def _another_document(txn: Transaction) -> None:
    key, row = next(iter(txn.scan("chunks")))
    chunk = parse_chunk(row)
    object.__setattr__(chunk, "document_id", "b")
    txn.put("chunks", key, pack_chunk(chunk))


def _first(table: str, txn: Transaction) -> bytes:
    return next(iter(txn.scan(table)))[0]


def _first_byte_changed(txn: Transaction) -> None:
    key = _first("segments", txn)
    payload = bytearray(txn.get("segments", key) or b"")
    payload[0] ^= 1
    txn.put("segments", key, bytes(payload))


DAMAGE: dict[str, tuple[Callable[[Transaction], object], str]] = {
    "no text": (lambda txn: txn.delete("texts", digest("a")), "texts: a has none"),
    "no document": (lambda txn: txn.delete("documents", b"a"), "chunks: some belong to no document"),
    "no chunk": (lambda txn: txn.delete("chunks", _first("chunks", txn)), "chunks: a should have 2"),
    "chunk of another": (_another_document, "lies under a"),
    "no place": (lambda txn: txn.delete("places", _first("places", txn)), "places: 1 are kept for 2"),
    "no reference": (lambda txn: txn.delete("references", _first("references", txn)), "references and needs differ"),
    "no record": (lambda txn: txn.delete("kv", _first("kv", txn)), "is not there"),
    "no segment": (lambda txn: txn.delete("segments", _first("segments", txn)), "is missing"),
    "a changed segment": (_first_byte_changed, "does not match"),
    "a stray segment": (lambda txn: txn.put("segments", bytes(36), b"x"), "1 belong to no record"),
    "a stray text": (
        lambda txn: txn.put("texts", digest("b"), bytes(txn.get("texts", digest("a")) or b"")),
        "texts: some",
    ),
    "a strange fact": (lambda txn: txn.put("meta", b"fiction", b"1"), "is unknown"),
    "no format": (lambda txn: txn.delete("meta", b"format"), "no format"),
}


def test_a_clean_store_has_no_problems(store: Store, write: Callable[..., object]) -> None:
    assert problems(store) == []
    write(store, "a", (1, 2), (3,))
    assert problems(store) == []


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(store: Store, write: Callable[..., object], damage: str) -> None:
    change, says = DAMAGE[damage]
    write(store, "a", (1, 2), (3,))
    store._live().write(change)
    assert any(says in problem for problem in problems(store)), problems(store)
