"""Any sequence of writes, deletes and reopenings leaves the store equal to a plain dict that did the same."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ragkv.attention.kv import ChunkKV
from ragkv.store import KVIdentity, Raw, Store, Zstd
from ragkv.types import Chunk, Document, Encoding

names = st.sampled_from(["a", "b", "c"])
tokens = st.lists(st.sampled_from([(1,), (1, 2), (3, 4, 5), ()]), max_size=4)


def identity_of(ids: tuple[int, ...], encoding: Encoding = Encoding.STANDALONE) -> KVIdentity:
    prefix_ids = (9,) if encoding is Encoding.PREFIXED else ()
    return KVIdentity(model="m", encoding=encoding, prefix_ids=prefix_ids, chunk_ids=ids)


def kv_of(identity: KVIdentity) -> ChunkKV:
    """20 KB per token, so that a few of them outgrow the first map."""
    generator = torch.Generator().manual_seed(hash(identity.chunk_ids) % 1000)
    tensor = torch.randn(4, len(identity.chunk_ids), 1280, generator=generator).bfloat16()
    return ChunkKV(keys=(tensor,), values=(-tensor,), encoded_at=len(identity.prefix_ids))


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp())
        self.store = Store.create(self.path, map_size=256 << 10)
        self.documents: dict[str, tuple[list[Chunk], dict[str, set[KVIdentity]]]] = {}
        self.staged: set[KVIdentity] = set()

    @initialize(name=names)
    def one_document(self, name: str) -> None:
        self.write(name, [(1, 2), (1, 2)])

    @rule(name=names, token_ids=tokens)
    def write(self, name: str, token_ids: list[tuple[int, ...]]) -> None:
        chunks = [
            Chunk(
                chunk_id=f"{name}#{n}",
                document_id=name,
                ordinal=n,
                text=str(ids),
                token_ids=ids,
                start=n,
                end=n,
            )
            for n, ids in enumerate(token_ids)
        ]
        needs = {chunk.chunk_id: {identity_of(chunk.token_ids)} for chunk in chunks}
        new = {of for needed in needs.values() for of in needed if not self.store.has_kv(of)}
        self.store.write_document(
            Document(document_id=name, source=name, content_hash=str(token_ids)),
            f"text {token_ids}",
            chunks,
            recipe="r",
            records=((of, kv_of(of)) for of in new),
            references={chunk_id: list(needed) for chunk_id, needed in needs.items()},
        )
        self.forget(name)
        self.documents[name] = (chunks, needs)
        self.staged -= {of for needed in needs.values() for of in needed}

    @rule(name=names)
    def delete(self, name: str) -> None:
        assert self.store.delete_document(name) == (name in self.documents)
        self.forget(name)

    def forget(self, name: str) -> None:
        """What an earlier version needed was no orphan, so it goes with it."""
        self.documents.pop(name, None)

    @rule(ids=st.sampled_from([(1,), (3, 4, 5), (6,)]))
    def stage(self, ids: tuple[int, ...]) -> None:
        self.store.stage_kv([(identity_of(ids), kv_of(identity_of(ids)))])
        if identity_of(ids) not in self.needed():
            self.staged.add(identity_of(ids))

    @rule(name=names)
    def put(self, name: str) -> None:
        chunks, needs = self.documents.get(name, ([], {}))
        of = identity_of(chunks[0].token_ids if chunks else (1,), Encoding.PREFIXED)
        assert self.store.put_kv(of, kv_of(of), chunk_id=f"{name}#0") == bool(chunks)
        if chunks:
            needs[f"{name}#0"].add(of)

    @rule(compress=st.booleans())
    def reopen(self, compress: bool) -> None:
        self.store.close()
        self.store = Store.open(self.path, codec=Zstd() if compress else Raw())

    def needed(self) -> set[KVIdentity]:
        return {of for _, needs in self.documents.values() for needed in needs.values() for of in needed}

    @invariant()
    def equal(self) -> None:
        assert [stored.document.document_id for stored in self.store.documents()] == sorted(self.documents)
        for name, (chunks, _) in self.documents.items():
            assert list(self.store.chunks(name)) == chunks
            assert self.store.text(name) == f"text {[chunk.token_ids for chunk in chunks]}"
        there = self.needed() | self.staged
        for of in there:
            kv = self.store.get_kv(of)
            assert kv is not None
            assert torch.equal(kv.keys[0], kv_of(of).keys[0])
            assert torch.equal(kv.values[0], kv_of(of).values[0])
        assert set(self.store.orphans()) == {of.key() for of in self.staged}
        verification = self.store.verify()
        assert verification.findings == ()
        assert verification.orphans.records == len(self.staged)
        stats = self.store.stats()
        assert stats.kv_records == len(there)
        assert stats.chunks == sum(len(chunks) for chunks, _ in self.documents.values())

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.path)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=40, stateful_step_count=20, deadline=None, derandomize=True)
