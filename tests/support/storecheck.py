"""Every inconsistency that a store can have, found row by row: `problems(store)` lists them.

Deliberately slow and literal, and independent of the store's own bookkeeping; it reads the tables directly. The crash
tests use only this to judge a store.
"""

import json
from collections import Counter
from collections.abc import Iterator

from ragkv.store import Store
from ragkv.store.record import Manifest, decode_record
from ragkv.store.tables import INDEX_OWNER, TABLES, digest, document_key, parse_chunk, parse_document, parse_text

Table = dict[bytes, bytes]
Pairs = set[tuple[bytes, bytes]]


def problems(store: Store) -> list[str]:
    """One line per problem; empty for a consistent store."""
    with store._live().read() as txn:
        tables = {
            name: {key: bytes(value) for key, value in txn.scan(name)}
            for name, several in TABLES.items()
            if not several
        }
        pairs = {
            name: {(key, value) for key, _ in txn.scan(name) for value in txn.values(name, key)}
            for name, several in TABLES.items()
            if several
        }
        counts = {name: txn.count(name) for name in TABLES}
    found = [
        *_documents(tables),
        *_references(tables, pairs),
        *_records(tables),
        *_counters(tables, pairs),
        *_meta(tables["meta"]),
    ]
    for name, rows in (*tables.items(), *pairs.items()):
        if counts[name] != len(rows):
            found.append(f"{name}: {len(rows)} rows are found and {counts[name]} counted")
    return found


def _documents(tables: dict[str, Table]) -> Iterator[str]:
    """A document has its text and all its chunks in order; without a document, none of these exist."""
    names, places = set(), {}
    for key, value in tables["documents"].items():
        stored = parse_document(value)
        name = stored.document.document_id
        names.add(digest(name))
        if key != document_key(name):
            yield f"documents: {name} lies under another key"
        if digest(name) not in tables["texts"]:
            yield f"texts: {name} has none"
        rows = {place: row for place, row in tables["chunks"].items() if place.startswith(digest(name))}
        chunks = [parse_chunk(row) for _, row in sorted(rows.items())]
        if [place[32:] for place in sorted(rows)] != [n.to_bytes(4, "big") for n in range(stored.chunks)]:
            yield f"chunks: {name} should have {stored.chunks} and has {len(rows)}"
        if sum(len(chunk.token_ids) for chunk in chunks) != stored.tokens:
            yield f"chunks: {name} has another number of tokens"
        for place, chunk in zip(sorted(rows), chunks, strict=True):
            places[digest(chunk.chunk_id)] = place
            if chunk.document_id != name:
                yield f"chunks: {chunk.chunk_id} of {chunk.document_id} lies under {name}"
    for value in tables["texts"].values():
        parse_text(value)
    if not tables["texts"].keys() <= names:
        yield "texts: some belong to no document"
    if not {place[:32] for place in tables["chunks"]} <= names:
        yield "chunks: some belong to no document"
    if tables["places"] != places:
        yield f"places: {len(tables['places'])} are kept for {len(places)} chunks"


def _references(tables: dict[str, Table], pairs: dict[str, Pairs]) -> Iterator[str]:
    """`references` and `needs` mirror each other, for existing chunks and records."""
    if {(chunk, key) for key, chunk in pairs["references"]} != pairs["needs"]:
        yield "references and needs differ"
    for key, owner in pairs["references"]:
        if key not in tables["kv"]:
            yield f"references: record {key.hex()[:8]} is not there"
        if owner != INDEX_OWNER and owner not in tables["places"]:
            yield f"references: the chunk that needs record {key.hex()[:8]} is not there"


def _records(tables: dict[str, Table]) -> Iterator[str]:
    """Every record decodes, all its checksums match, and every segment has a record."""
    known = set()
    for key, value in tables["kv"].items():
        manifest = Manifest.parse(value)
        if manifest.identity.key() != key:
            yield f"kv: record {key.hex()[:8]} lies under another key"
        names = [key + index.to_bytes(4, "big") for index in range(len(manifest.segments))]
        known.update(names)
        try:
            decode_record(manifest, lambda index, names=names: tables["segments"].get(names[index]))  # type: ignore[misc]
        except ValueError as error:
            yield f"kv: record {key.hex()[:8]}: {error}"
    if stray := tables["segments"].keys() - known:
        yield f"segments: {len(stray)} belong to no record"


def _counters(tables: dict[str, Table], pairs: dict[str, Pairs]) -> Iterator[str]:
    """The counters equal a count of the rows, and the list of unreferenced KV is complete."""
    counts = Counter(tokens=sum(parse_document(value).tokens for value in tables["documents"].values()))
    for manifest in map(Manifest.parse, tables["kv"].values()):
        counts[f"kv/{manifest.identity.encoding.value}"] += manifest.stored_bytes
        counts["raw"] += manifest.raw_bytes
    counters = json.loads(tables["meta"].get(b"counters", b"{}12345678")[:-8])
    if counters != dict(+counts):
        yield f"counters: {counters} are counted, and {counts} are there"
    if tables["unreferenced"].keys() != tables["kv"].keys() - {key for key, _ in pairs["references"]}:
        yield f"unreferenced: {len(tables['unreferenced'])} keys are listed, which are not those of the orphans"


def _meta(meta: Table) -> Iterator[str]:
    for key, value in meta.items():
        if key == b"format":
            int(value)
        elif key == b"generation":
            if len(value) != 8:
                yield "meta: the generation is malformed"
        elif key.startswith((b"fact/", b"shape/")):
            json.loads(value)
        elif key != b"counters":
            yield f"meta: {key!r} is unknown"
    if b"format" not in meta:
        yield "meta: there is no format"
