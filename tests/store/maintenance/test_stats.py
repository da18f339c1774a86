"""Garbage is what nothing refers to, and nothing else goes."""

from typing import Any

import pytest
from storekit import identity, make_kv

from ragkv.store import Manifest


def everything(_: Manifest) -> bool:
    return True


@pytest.mark.parametrize("dry_run", [True, False])
def test_orphans_go_with_their_segments(library, dry_run):
    before = library.rows()
    staged, damaged = identity(*range(50)), identity(*range(60))
    library.store.stage_kv([(staged, make_kv(50)), (damaged, make_kv(60))])
    library.edit(lambda txn: txn.put("kv", damaged.key(), b"no manifest"))
    library.edit(lambda txn: txn.put("segments", b"x" * 32 + bytes(4), b"payload"))
    with_garbage = library.rows()
    found = library.store.collect(in_use=everything, dry_run=dry_run)
    assert (found.records, found.segments, found.index_records) == (2, 1, 0)
    assert found.bytes == make_kv(50).nbytes + make_kv(60).nbytes + len(b"payload")
    assert library.rows() == (with_garbage if dry_run else before)
    assert library.store.collect(in_use=everything).records == (2 if dry_run else 0)


def test_the_prefix_of_another_prompt_goes(library):
    before = library.rows()
    old, foreign = identity(7, 8), identity(1, 2, 3, model="another")
    for of in (old, foreign):
        library.store.keep_kv(of, make_kv(len(of.chunk_ids)))
    found = library.store.collect(in_use=lambda manifest: manifest.identity == library.prefix)
    assert (found.records, found.index_records) == (0, 2)
    assert library.rows() == before


def test_what_a_chunk_needs_stays_whoever_else_needed_it(library):
    chunk = next(library.store.chunks("c"))
    of = library.identities(chunk)[0]
    library.store.keep_kv(of, library.encode([of])[0])
    assert library.store.collect(in_use=lambda _: False).index_records == 1  # the prefix alone
    assert library.store.has_kv(of)
    assert library.store.verify().ok


def test_a_list_that_names_what_is_in_use_is_mended(library):
    used = library.identities(next(library.store.chunks("c")))[0].key()
    library.edit(lambda txn: txn.put("unreferenced", used, b""))
    assert library.store.collect(in_use=everything, dry_run=True).records == 0
    assert not library.store.verify().ok
    assert library.store.collect(in_use=everything).records == 0
    assert library.store.verify().ok


def test_a_record_that_is_taken_up_meanwhile_stays(library, monkeypatch):
    """Between finding garbage and dropping it, a question may have put the record for a chunk of its own."""
    from ragkv.store.maintenance import space

    staged = library.identities(next(library.store.chunks("c")))[0]
    late = identity(*range(9), model="m")
    library.store.stage_kv([(late, library.encode([late])[0])])
    sweep = space._sweep

    def put_first(*arguments: Any) -> None:
        library.store.put_kv(late, library.encode([late])[0], chunk_id=next(library.store.chunks("c")).chunk_id)
        sweep(*arguments)

    monkeypatch.setattr(space, "_sweep", put_first)
    assert library.store.collect(in_use=everything).records == 0
    assert library.store.has_kv(late)
    assert library.store.has_kv(staged)
