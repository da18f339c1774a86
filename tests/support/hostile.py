"""A small index, modified row by row as by a hostile author, with right checksums.

`Attack` holds the index's rows; `mutated` gives seeded changes of one kind of row as values by key.
"""

import json
import random
import re
import shutil
import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import xxhash
import zstandard
from mutation import mutants

from ragkv.store.codecs import add_checksum
from ragkv.store.tables import TABLES

__all__ = ["KINDS", "Attack", "Change", "bomb"]

_HEAD = struct.Struct("<4sHBBIIIIIIIII")
_EXTREMES = (0, 1, 2, 7, 255, 1 << 16, 1 << 20, 1 << 31, (1 << 32) - 1)
Row = tuple[str, bytes, bytes | None]


@dataclass(frozen=True, slots=True)
class Change:
    """A description of the change, and the rows to write (None: delete)."""

    what: str
    rows: tuple[Row, ...] = ()
    config: str | None = None


class Attack:
    """An index (compacted, so that its file is small) and its rows."""

    def __init__(self, index: Path) -> None:
        self.config = (index / "ragkv.toml").read_text()
        self._data = (index / "store" / "data.mdb").read_bytes()
        self.rows: dict[str, list[tuple[bytes, bytes]]] = {}
        with closing(_open(index)) as env, env.begin() as txn:
            for name in TABLES:
                self.rows[name] = list(txn.cursor(env.open_db(name.encode(), txn, **_flags(name), create=False)))
        for left in ("lock.mdb", "writer.lock"):
            (index / "store" / left).unlink(missing_ok=True)

    def write(self, index: Path, change: Change) -> None:
        """Write the index to `index` with a change."""
        shutil.rmtree(index, ignore_errors=True)
        (index / "store").mkdir(parents=True)
        (index / "ragkv.toml").write_text(change.config or self.config, "utf-8", "surrogatepass")
        (index / "store" / "data.mdb").write_bytes(self._data)
        with closing(_open(index)) as env, env.begin(write=True) as txn:
            for table, key, value in change.rows:
                database = env.open_db(table.encode(), txn, **_flags(table))
                if not TABLES[table] or value is None:
                    txn.delete(key, db=database)
                if value is not None:
                    txn.put(key, value, db=database)
        (index / "store" / "lock.mdb").unlink()

    def changes(self, kind: str, rng: random.Random, count: int) -> Iterator[Change]:
        yield from getattr(self, f"_{kind}")(rng, count)

    def _documents(self, rng: random.Random, count: int) -> Iterator[Change]:
        key, value = rng.choice(self.rows["documents"])
        for what, row in mutants(json.loads(value[:-8]), rng, count):
            yield Change(f"document: {what}", (("documents", key, add_checksum(json.dumps(row).encode())),))

    def _chunks(self, rng: random.Random, count: int) -> Iterator[Change]:
        key, value = rng.choice(self.rows["chunks"])
        end = 4 + struct.unpack_from("<I", value)[0]
        for what, row in mutants(json.loads(value[4:end]), rng, count):
            head = json.dumps(row).encode()
            new = add_checksum(struct.pack("<I", len(head)), head, value[end:-8])
            yield Change(f"chunk: {what}", (("chunks", key, new),))

    def _tokens(self, rng: random.Random, count: int) -> Iterator[Change]:
        key, value = rng.choice(self.rows["chunks"])
        end = 4 + struct.unpack_from("<I", value)[0]
        ids: list[Any] = [[], [1 << 31], [(1 << 32) - 1] * 3, list(range(100_000)), b"\x01\x02\x03", [0]]
        for _ in range(count):
            found = rng.choice(ids)
            packed = found if isinstance(found, bytes) else np.array(found, "<u4").tobytes()
            yield Change(f"tokens {str(found)[:20]}", (("chunks", key, add_checksum(value[:end], packed)),))
            length = struct.pack("<I", rng.choice(_EXTREMES))
            yield Change(f"length {length!r}", (("chunks", key, add_checksum(length, value[4:-8])),))

    def _texts(self, rng: random.Random, count: int) -> Iterator[Change]:
        key, _ = rng.choice(self.rows["texts"])
        for new in (
            add_checksum(b""),
            add_checksum(b"\xff\xfe"),
            add_checksum("\x1b[31m\ud800".encode("utf-8", "surrogatepass")),
            b"",
            None,
        ):
            yield Change(f"text {new!r}"[:40], (("texts", key, new),))

    def _facts(self, rng: random.Random, count: int) -> Iterator[Change]:
        facts = [(key, value) for key, value in self.rows["meta"] if key.startswith(b"fact/")]
        for key, value in facts:
            for what, fact in mutants(json.loads(value), rng, max(1, count // 2)):
                yield Change(f"{key!r}: {what}", (("meta", key, json.dumps(fact).encode()),))
        yield Change("quality", (("meta", b"fact/quality", json.dumps([{"engines": [{}]}]).encode()),))
        yield Change("nested", (("meta", rng.choice(facts)[0], b"[" * 100_000),))

    def _numbers(self, rng: random.Random, count: int) -> Iterator[Change]:
        for value in (b"", b"\xff" * 8, b"\xff" * 500, b"\0"):
            yield Change(f"generation {value[:9]!r}", (("meta", b"generation", value),))
        for key, _ in self.rows["meta"]:
            if key.startswith(b"shape/"):
                yield Change("shape", (("meta", key, b"[]"),))

    def _manifests(self, rng: random.Random, count: int) -> Iterator[Change]:
        """Fields of the header, of a layer, of a segment."""
        for _ in range(count):
            key, value = rng.choice(self.rows["kv"])
            body = bytearray(value[:-8])
            fields = _HEAD.unpack_from(body)
            shapes = len(body) - 20 * fields[8] - 12 * fields[7]
            at = rng.choice([8, 12, 16, 20, 24, 28, 32, 36, 40, *range(shapes, len(body), 4)])
            new = rng.choice(_EXTREMES)
            struct.pack_into("<I", body, at, new)
            yield Change(f"manifest at {at}: {new}", (("kv", key, add_checksum(bytes(body))),))
            body = bytearray(value[:-8])
            body[rng.choice((4, 6, 7))] = rng.randrange(256)
            yield Change("manifest: dtype, encoding, version", (("kv", key, add_checksum(bytes(body))),))
            yield Change("manifest: cut", (("kv", key, add_checksum(value[: rng.randrange(len(value))])),))

    def _codecs(self, rng: random.Random, count: int) -> Iterator[Change]:
        key, value = rng.choice(self.rows["kv"])
        fields = _HEAD.unpack_from(value)
        start = _HEAD.size + fields[9]
        honest = json.loads(value[start : start + fields[10]])
        found = [
            *mutants(honest, rng, count),
            ("list", ["zstd"]),
            ("id", {"id": ["raw"]}),
            ("level", {"id": "zstd", "level": "x"}),
        ]
        for what, codec in found:
            text = json.dumps(codec).encode()
            head = _HEAD.pack(*fields[:10], len(text), *fields[11:])
            parts = (head, value[_HEAD.size : start], text, value[start + fields[10] : -8])
            yield Change(f"codec: {what}", (("kv", key, add_checksum(*parts)),))

    def _shapes(self, rng: random.Random, count: int) -> Iterator[Change]:
        """Complete and consistent manifests of other layers: one fewer, other heads, none."""
        for key, value in self.rows["kv"][:2]:
            fields = list(_HEAD.unpack_from(value))
            layers, segments = fields[7], fields[8]
            body = value[:-8]
            cut = len(body) - 20 * segments
            shapes = [list(struct.unpack_from("<III", body, cut - 12 * (layers - n))) for n in range(layers)]
            parts = [struct.unpack_from("<IIIQ", body, cut + 20 * n) for n in range(segments)]
            fewer = [part for part in parts if part[0] < layers - 1]
            middle = body[_HEAD.size : cut - 12 * layers]
            for what, new_shapes, new_parts in (
                ("a layer less", shapes[:-1], fewer),
                (
                    "half the heads",
                    [[2 * dim if at == 0 else dim // 2 for at, dim in enumerate(s)] for s in shapes],
                    parts,
                ),
                ("no heads", [[0, *shape[1:]] for shape in shapes], []),
                ("no layers", [], []),
            ):
                fields[7], fields[8] = len(new_shapes), len(new_parts)
                packed = [struct.pack("<III", *shape) for shape in new_shapes]
                cuts = [struct.pack("<IIIQ", *part) for part in new_parts]
                yield Change(what, (("kv", key, add_checksum(_HEAD.pack(*fields), middle, *packed, *cuts)),))

    def _segments(self, rng: random.Random, count: int) -> Iterator[Change]:
        """A record that claims gigabytes, and invalid payloads of every codec."""
        key, value = rng.choice(self.rows["kv"])
        for claim, number in ((1 << 32) - 1, 1), (1 << 20, 1), (1 << 20, 40 << 10):
            yield Change(f"{number} segments of {claim}", tuple(bomb(key, value, claim, number)))
        for payload in (b"", b"\x00", b"\xff" * 64, bytes(1000), b"\x02" + b"\xff" * 40):
            for codec in ("raw", "zstd", "int8", "int4"):
                yield Change(f"{codec} {payload[:4]!r}", tuple(_swapped(key, value, payload, codec)))

    def _places(self, rng: random.Random, count: int) -> Iterator[Change]:
        key, _ = rng.choice(self.rows["places"])
        for value in (b"", b"\0", bytes(36), b"\xff" * 36, bytes(600)):
            yield Change(f"place of {len(value)}", (("places", key, value),))

    def _pairs(self, rng: random.Random, count: int) -> Iterator[Change]:
        for table in ("references", "needs"):
            key, _ = rng.choice(self.rows[table])
            yield Change(f"{table}: a stranger", ((table, key, rng.randbytes(32)),))
            yield Change(f"{table}: a short key", ((table, b"x", rng.randbytes(32)),))
            yield Change(f"{table}: gone", ((table, key, None),))
        yield Change("a short key", (("kv", b"\x00", self.rows["kv"][0][1]), ("segments", b"\x01", b"x")))

    def _vectors(self, rng: random.Random, count: int) -> Iterator[Change]:
        for key, value in self.rows["vectors"][:2]:
            for _ in range(count):
                body = bytearray(value[:-8])
                at = rng.choice((0, 1, 2, 6, 10))
                body[at : at + 4] = struct.pack("<I", rng.choice(_EXTREMES))
                yield Change(f"vector at {at}", (("vectors", key, add_checksum(bytes(body))),))
            yield Change("NaN", (("vectors", key, add_checksum(value[:10], b"\xff" * (len(value) - 18))),))

    def _config(self, rng: random.Random, count: int) -> Iterator[Change]:
        lines = self.config.splitlines()
        found = [n for n, line in enumerate(lines) if " = " in line and not line.startswith(("model", "embedder"))]
        values = (
            "[[[]]]",
            '"' + "9" * 400 + 'GiB"',
            "-1",
            "9" * 5000,
            "[" * 5000,
            "{}",
            '"../x"',
            "1e999",
            "nan",
            "true",
        )
        for _ in range(count):
            at, value = rng.choice(found), rng.choice(values)
            changed = [*lines[:at], f"{lines[at].split(' = ')[0]} = {value}", *lines[at + 1 :]]
            yield Change(f"config: {changed[at][:40]}", config="\n".join(changed))


KINDS = tuple(name[1:] for name in vars(Attack) if re.match("_[a-z]", name) and name != "_data")


def bomb(key: bytes, manifest: bytes, claim: int, number: int) -> Iterator[Row]:
    """A record of zeros: `number` zstd segments that claim `claim` bytes each, in a layer with the same claim."""
    fields = list(_HEAD.unpack_from(manifest))
    tokens = fields[5]
    item = 4 if fields[2] == 3 else 2
    small = zstandard.ZstdCompressor().compress(bytes(claim // item if claim <= 1 << 20 else 8))
    payload = struct.pack(f"<B{item}I", item, *[len(small)] * item) + small * item
    start = _HEAD.size + fields[9]
    middle = manifest[start + fields[10] : start + fields[10] + 4 * (fields[6] + tokens)]
    codec = b'{"id":"zstd","level":1}'
    width = max(1, claim * number // (2 * tokens * item))
    fields[7], fields[8], fields[10] = 1, number, len(codec)
    cut = struct.pack("<IIIQ", 0, claim, len(payload), xxhash.xxh3_64_intdigest(payload))
    shape = struct.pack("<III", 1, width, width)
    yield "kv", key, add_checksum(_HEAD.pack(*fields), manifest[_HEAD.size : start], codec, middle, shape, cut * number)
    for index in range(min(number, 64)):
        yield "segments", key + index.to_bytes(4, "big"), payload


def _swapped(key: bytes, manifest: bytes, payload: bytes, codec: str) -> Iterator[Row]:
    """The first segment with another payload, under its right checksum."""
    fields = list(_HEAD.unpack_from(manifest))
    start = _HEAD.size + fields[9]
    text = json.dumps({"id": codec}).encode()
    cut = len(manifest) - 8 - 20 * fields[8]
    layer, raw, _, _ = struct.unpack_from("<IIIQ", manifest, cut)
    first = struct.pack("<IIIQ", layer, raw, len(payload), xxhash.xxh3_64_intdigest(payload))
    old, fields[10] = fields[10], len(text)
    parts = (manifest[_HEAD.size : start], text, manifest[start + old : cut], first, manifest[cut + 20 : -8])
    yield "kv", key, add_checksum(_HEAD.pack(*fields), *parts)
    yield "segments", key + bytes(4), payload


def _open(index: Path) -> Any:
    return lmdb.open(str(index / "store"), map_size=64 << 20, max_dbs=len(TABLES), sync=False)


def _flags(table: str) -> dict[str, bool]:
    return {"dupsort": TABLES[table], "dupfixed": TABLES[table]}
