"""A full disk: what takes documents away still works, also when the index is older than the reserve."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from namespace import namespace

SCRIPT = """
import os, resource, subprocess, sys
from pathlib import Path
import torch
from ragkv.errors import StoreFullError
from ragkv.attention.kv import ChunkKV
from ragkv.store import KVIdentity, Store, database
from ragkv.store.pages.reserve import Reserve
from ragkv.types import Chunk, Document, Encoding

way, old, folder = sys.argv[1], sys.argv[2] == "old", Path(sys.argv[3])
if way == "tmpfs":
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "none", folder], check=True)
keep = Reserve.keep

def record(n):
    tensor = torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(n))
    identity = KVIdentity(model="c0ffee", encoding=Encoding.STANDALONE, prefix_ids=(), chunk_ids=(n,) * 8)
    return identity, ChunkKV(keys=(tensor,) * 4, values=(tensor,) * 4, encoded_at=0)

def write(store, d, count):
    records = [record(1000 * d + n) for n in range(count)]
    chunks = [
        Chunk(chunk_id=f"{d}#{n}", document_id=f"{d}", ordinal=n, text=f"words {n}", token_ids=identity.chunk_ids,
              start=n, end=n + 1)
        for n, (identity, _) in enumerate(records)
    ]
    store.write_document(
        Document(document_id=f"{d}", source=f"{d}", content_hash="0"), "x" * count, chunks, recipe="r",
        records=records, references={f"{d}#{n}": [identity] for n, (identity, _) in enumerate(records)},
    )

def full(store):
    try:
        for d in range(100):
            write(store, d, 5)
    except StoreFullError as error:
        assert "is full" in str(error) and "make room" in str(error)
        return d
    raise AssertionError("never full")

if old:
    Reserve.keep = lambda self, used, end: None
with Store.create(folder / "index", map_size=1 << 20) as store:
    write(store, 0, 5)
    if way == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 20, 5 << 20))
    count = full(store)
    assert count > 2
if way == "tmpfs":
    filler = os.open(folder / "filler", os.O_WRONLY | os.O_CREAT)
    try:
        while os.write(filler, bytes(4096)):
            continue
    except OSError:
        os.close(filler)
    assert os.statvfs(folder).f_bavail == 0
Reserve.keep = keep
with Store.open(folder / "index") as store:
    with store.writing("delete", timeout=0):  # writes its name into a file
        for d in range(1, count - 1):
            assert store.delete_document(f"{d}")
            assert store.verify().ok
        store.collect(in_use=lambda manifest: True)
    store.put_meta("still", "writable")
with Store.open(folder / "index") as store:
    assert [stored.document.document_id for stored in store.documents()] == sorted(["0", f"{count - 1}"])
    assert all(torch.equal(store.get_kv(identity).keys[0], kv.keys[0]) for identity, kv in map(record, range(5)))
    write(store, 7, 5)  # into the pages that are free
    assert store.verify().ok
print("ok")
"""


# An old file that is as long as its quota has no room that was kept back.
@pytest.mark.parametrize(("way", "age"), [("tmpfs", "new"), ("tmpfs", "old"), ("limit", "new")])
def test_documents_can_be_deleted_from_a_full_disk(way: str, age: str, tmp_path: Path) -> None:
    prefix = namespace() if way == "tmpfs" else ()
    if prefix is None:
        pytest.skip("no mount namespace to make a small disk in: the quota on file sizes is tried all the same")
    command = [*prefix, sys.executable, "-c", SCRIPT, way, age, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
