"""Small, deterministic documents, chunks and KV for the tests of the store."""

import numpy as np
import torch

from ragkv.attention.kv import ChunkKV
from ragkv.store import ChunkVectors, KVIdentity
from ragkv.types import Chunk, Document, Encoding


def make_kv(tokens, *, layers=2, kv_heads=2, head_dim=4, dtype=torch.bfloat16, seed=0, encoded_at=0):
    generator = torch.Generator().manual_seed(seed)

    def tensor():
        return torch.randn(kv_heads, tokens, head_dim, generator=generator).to(dtype)

    return ChunkKV(
        keys=tuple(tensor() for _ in range(layers)),
        values=tuple(tensor() for _ in range(layers)),
        encoded_at=encoded_at,
    )


def identity(*chunk_ids, prefix_ids=(), model="c0ffee"):
    encoding = Encoding.PREFIXED if prefix_ids else Encoding.STANDALONE
    return KVIdentity(model=model, encoding=encoding, prefix_ids=prefix_ids, chunk_ids=chunk_ids)


def document(name, content_hash="00"):
    return Document(document_id=name, source=f"{name}.txt", content_hash=content_hash, metadata={"author": "A"})


def chunk(name, ordinal, token_ids):
    return Chunk(
        chunk_id=f"{name}#{ordinal}",
        document_id=name,
        ordinal=ordinal,
        text=f"text {token_ids}",
        token_ids=token_ids,
        start=ordinal,
        end=ordinal + 1,
        page=ordinal,
        heading="H",
    )


def equal(left, right):
    return (
        left is not None
        and left.encoded_at == right.encoded_at
        and left.dtype == right.dtype
        and left.shape == right.shape
        and all(
            torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
            for a, b in zip(left.wide().tensors, right.wide().tensors, strict=True)
        )
    )


def write(store, name, *token_ids, content_hash="00", kv=True):
    """Write a document of one chunk per tuple of ids; with `kv`, each with its standalone record and its vectors."""
    chunks = [chunk(name, ordinal, ids) for ordinal, ids in enumerate(token_ids)]
    identities = {chunk.chunk_id: identity(*chunk.token_ids) for chunk in chunks if kv}
    store.write_document(
        document(name, content_hash),
        f"the text of {name}",
        chunks,
        recipe="recipe",
        records=((identity, kv_of(identity)) for identity in identities.values()),
        references={chunk_id: [identity] for chunk_id, identity in identities.items()},
        vectors={chunk.chunk_id: vectors_of(chunk) for chunk in chunks if kv},
    )
    return chunks


def put_kv(store, identity, kv, chunk_id):
    """Store KV as the question that encoded it does; whether it was stored."""
    return bool(store.put_many([(identity, kv, chunk_id)]))


def vectors_of(chunk):
    """Vectors that are a function of the chunk."""
    numbers = np.random.default_rng([chunk.ordinal, *chunk.token_ids])
    return ChunkVectors(
        dense=numbers.random(8, np.float32),
        sparse={f"t{token}": float(numbers.integers(9)) / 8 for token in chunk.token_ids},
        colbert=numbers.random((len(chunk.token_ids), 4)).astype(np.float16),
    )


def kv_of(identity):
    """KV that is a function of the identity, so that a test can see whose it is."""
    return make_kv(len(identity.chunk_ids), seed=int.from_bytes(identity.key()[:4], "big"))


def big(n: int, tokens: int = 1000) -> tuple[KVIdentity, ChunkKV]:
    """The n-th of many records, 1 KB per token and tensor."""
    tensor = torch.full((4, tokens, 128), n, dtype=torch.bfloat16)
    return identity(n, *range(tokens - 1)), ChunkKV(keys=(tensor,), values=(tensor,))
