"""The expected content of a store after a list of operations, kept in plain dicts.

An operation is a JSON object, so that a writer can announce it over a pipe. It and the content that it writes are drawn
from its number, so content in a store identifies the operation that wrote it.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from storekit import chunk, document, equal, identity, put_kv, vectors_of

from ragkv.attention.kv import ChunkKV
from ragkv.store import KVIdentity, Store
from ragkv.store.record import Manifest
from ragkv.store.tables import INDEX_OWNER, digest
from ragkv.types import Chunk

NAMES = [f"document {n}" for n in range(5)]
TOKENS = [tuple(range(start, start + length)) for start, length in enumerate((1, 2, 3, 8, 13, 21, 34, 40))]
Operation = dict[str, Any]


def operation(number: int, kind: str | None = None) -> Operation:
    """The operation with this number; it does not depend on the store."""
    draw = random.Random(number)
    kind = kind or draw.choices(["write", "delete", "stage", "put", "keep", "meta", "evict"], [8, 3, 3, 3, 1, 1, 3])[0]
    operation = {"number": number, "kind": kind, "name": draw.choice(NAMES)}
    if kind == "write":
        operation["tokens"] = [draw.choice(TOKENS) for _ in range(draw.randrange(6))]
        operation["all"] = draw.random() < 0.5
    elif kind == "stage":
        operation["tokens"] = draw.sample(TOKENS, draw.randrange(2, 7))
    elif kind == "put":
        operation["ordinal"] = draw.randrange(3)
    elif kind == "keep":
        operation["tokens"] = [draw.choice(TOKENS)]
    elif kind == "meta":
        operation["value"] = "x" * draw.randrange(2000)
    return operation


def kv_of(of: KVIdentity, number: int) -> ChunkKV:
    """Up to 120 KB of unique content; the first item is the number of the operation that wrote it."""
    layers, tokens = 1 + number % 3, len(of.chunk_ids)
    seed = int.from_bytes(of.key()[:8], "big") ^ number
    items = np.random.Generator(np.random.PCG64(seed)).random((layers, 2, 2, tokens, 64), np.float32)
    items[0, 0, 0, 0, 0] = number
    tensors = torch.from_numpy(items)
    return ChunkKV(
        keys=tuple(layer[0] for layer in tensors),
        values=tuple(layer[1] for layer in tensors),
        encoded_at=len(of.prefix_ids),
    )


def chunks_of(name: str, tokens: list[Any]) -> list[Chunk]:
    return [chunk(name, ordinal, tuple(ids)) for ordinal, ids in enumerate(tokens)]


def perform(store: Store, operation: Operation) -> bool | None:
    """Run the operation; returns the store's result."""
    number, name = operation["number"], operation["name"]
    match operation["kind"]:
        case "write":
            chunks = chunks_of(name, operation["tokens"])
            wanted = {identity(*chunk.token_ids) for chunk in chunks}
            given = {of for of in wanted if operation["all"] or not store.has_kv(of)}
            store.write_document(
                document(name, str(number)),
                f"{number}",
                chunks,
                recipe="recipe",
                records=((of, kv_of(of, number)) for of in given),
                references={chunk.chunk_id: [identity(*chunk.token_ids)] for chunk in chunks},
                vectors={chunk.chunk_id: vectors_of(chunk) for chunk in chunks},
            )
        case "delete":
            return store.delete_document(name)
        case "stage":
            store.stage_kv((identity(*ids), kv_of(identity(*ids), number)) for ids in operation["tokens"])
        case "put":
            chunk = store.chunk(f"{name}#{operation['ordinal']}")
            of = identity(*(chunk.token_ids if chunk else (1,)), prefix_ids=(7, 8))
            return put_kv(store, of, kv_of(of, number), f"{name}#{operation['ordinal']}")
        case "keep":
            of = identity(*operation["tokens"][0])
            store.keep_kv(of, kv_of(of, number))
        case "meta":
            store.put_meta(name, [number, operation["value"]])
        case "evict":
            store.set_budget(0)
            store.set_budget(None)
        case other:
            raise ValueError(f"no such operation: {other}")
    return None


@dataclass
class Expected:
    """The dicts. `records` maps an identity to the number of the operation whose KV is stored."""

    documents: dict[str, tuple[list[Any], int]] = field(default_factory=dict)
    needs: dict[str, set[KVIdentity]] = field(default_factory=dict)
    index: set[KVIdentity] = field(default_factory=set)
    records: dict[KVIdentity, int] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    generation: int = 0

    def after(self, operation: Operation) -> tuple[Expected, bool | None]:
        """The next state, and the store's result."""
        new = copy.deepcopy(self)
        number, name = operation["number"], operation["name"]
        tokens = [tuple(ids) for ids in operation.get("tokens", ())]
        match operation["kind"]:
            case "write":
                released = new._drop(name)
                for chunk in chunks_of(name, tokens):
                    new.needs[chunk.chunk_id] = {identity(*chunk.token_ids)}
                for of in {identity(*ids) for ids in tokens}:
                    if operation["all"] or of not in new.records:
                        new.records[of] = number
                new._collect(released)
                new.documents[name] = (tokens, number)
                new.generation += self.documents.get(name, (None, 0))[0] != tokens
            case "delete":
                new._collect(new._drop(name))
                new.generation += name in self.documents
                return new, name in self.documents
            case "stage":
                new.records |= dict.fromkeys((identity(*ids) for ids in tokens), number)
            case "put":
                owned, ordinal = self.documents.get(name, ([], 0))[0], operation["ordinal"]
                if ordinal >= len(owned):
                    return new, False
                of = identity(*owned[ordinal], prefix_ids=(7, 8))
                new.records[of] = number
                new.needs[f"{name}#{ordinal}"].add(of)
                return new, True
            case "keep":
                new.records[identity(*tokens[0])] = number
                new.index.add(identity(*tokens[0]))
            case "meta":
                new.meta[name] = [number, operation["value"]]
            case "evict":  # all KV that chunks need; KV of the index itself and staged KV stays
                gone = set().union(*new.needs.values())
                new.records = {of: by for of, by in new.records.items() if of not in gone}
                new.index -= gone
                new.needs = {chunk: set() for chunk in new.needs}
        return new, None

    def during(self, operation: Operation) -> Iterator[Expected]:
        """Every state that is possible if the writer died in the operation: before, after, and for staged KV, which
        comes in batches, those between.
        """
        yield self
        if operation["kind"] == "stage":
            for done in range(1, len(operation["tokens"])):
                yield self.after({**operation, "tokens": operation["tokens"][:done]})[0]
        yield self.after(operation)[0]

    def _drop(self, name: str) -> set[KVIdentity]:
        tokens, _ = self.documents.pop(name, ([], 0))
        return set().union(*(self.needs.pop(f"{name}#{ordinal}") for ordinal in range(len(tokens))))

    def _collect(self, released: set[KVIdentity]) -> None:
        for of in released - self.index - set().union(*self.needs.values()):
            self.records.pop(of, None)

    def view(self) -> dict[str, Any]:
        """The state in the form of `observe`."""
        needs = {(digest(chunk).hex(), of.key().hex()) for chunk, wanted in self.needs.items() for of in wanted}
        needs |= {(INDEX_OWNER.hex(), of.key().hex()) for of in self.index}
        return {
            "documents": {
                name: f"{number} {chunks_of(name, tokens)}" for name, (tokens, number) in self.documents.items()
            },
            "needs": needs,
            "records": {of.key().hex(): str(number) for of, number in self.records.items()},
            "meta": {name: repr(value) for name, value in self.meta.items()},
            "generation": self.generation,
        }


def observe(store: Store) -> dict[str, Any]:
    """The store's content, each record by the number of the operation that wrote all of it."""
    with store._live().read() as txn:
        manifests = [Manifest.parse(value) for _, value in txn.scan("kv")]
        owners = {key for key, _ in txn.scan("needs")}
        needs = {(owner.hex(), key.hex()) for owner in owners for key in txn.values("needs", owner)}
    return {
        "documents": {
            (name := stored.document.document_id): (
                f"{int(store.text(name) or -1)} {list(store.chunks(name))}"
                if stored.document.content_hash == store.text(name)
                else "its text is of another version"
            )
            for stored in store.documents()
        },
        "needs": needs,
        "records": {manifest.identity.key().hex(): _writer(store, manifest.identity) for manifest in manifests},
        "meta": {name: repr(value) for name in NAMES if (value := store.get_meta(name)) is not None},
        "generation": store.generation,
    }


def _writer(store: Store, of: KVIdentity) -> str:
    kv = store.get_kv(of)
    if kv is None:
        return "cannot be read"
    number = int(kv.keys[0][0, 0, 0])
    wanted = kv_of(of, number)
    return str(number) if equal(kv, wanted) else f"a mixture, which begins with {number}"
