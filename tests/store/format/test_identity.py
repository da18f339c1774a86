"""Whatever a chunk's KV depends on changes its key; nothing else does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.store import KVIdentity
from ragkv.store.format.identity import pack_ids, unpack_ids
from ragkv.types import Encoding

BASE = KVIdentity(model="ab", encoding=Encoding.PREFIXED, prefix_ids=(1, 2), chunk_ids=(3, 4))


@pytest.mark.parametrize(
    "other",
    [
        replace(BASE, model="ac"),
        replace(BASE, encoding=Encoding.STANDALONE, prefix_ids=()),
        replace(BASE, prefix_ids=(1, 5)),
        replace(BASE, prefix_ids=()),
        replace(BASE, chunk_ids=(3, 5)),
        replace(BASE, chunk_ids=(4, 3)),
        replace(BASE, prefix_ids=(1, 2, 3), chunk_ids=(4,)),
    ],
    ids=["model", "encoding", "prefix", "no-prefix", "chunk", "order", "boundary"],
)
def test_another_field_is_another_key(other: KVIdentity) -> None:
    assert other.key() != BASE.key()


def test_an_empty_prefix_is_not_standalone() -> None:
    prefixed = replace(BASE, prefix_ids=())
    assert prefixed.key() != replace(prefixed, encoding=Encoding.STANDALONE).key()


def test_the_schema_version_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    key = BASE.key()
    monkeypatch.setattr("ragkv.store.format.identity.SCHEMA_VERSION", 2)
    assert BASE.key() != key


def test_the_key_is_the_same_for_ever() -> None:
    assert BASE.key().hex() == "73023fd860768c82087dd1e3e3940f11a80474844e09f82e7c29577a1b4a73eb"


def test_standalone_refuses_a_prefix() -> None:
    with pytest.raises(ValueError, match="standalone"):
        replace(BASE, encoding=Encoding.STANDALONE)


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_ids_out_of_range_are_refused(bad: int) -> None:
    with pytest.raises(ValueError, match="32 bits"):
        replace(BASE, chunk_ids=(bad,)).key()


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_ids_survive_packing(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == tuple(ids)
