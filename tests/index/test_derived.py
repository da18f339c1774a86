"""Retrieval indexes whose files are cut while a process has them mapped: built again, not SIGBUS."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, sys
from pathlib import Path
import numpy as np
from ragkv.index.derived import Derived
from ragkv.retrievers import DenseConfig
from ragkv.store import ChunkVectors, Store
from ragkv.types import Chunk, Document

def vector(n):
    found = np.zeros(256, np.float32)
    found[n] = 1
    return ChunkVectors(dense=found, sparse={str(n): 1.0})

folder = Path(sys.argv[1])
store = Store.create(folder)
chunks = [Chunk(chunk_id=f"c{n}", document_id="a", ordinal=n, text=f"word{n} and more words", token_ids=(n,),
                start=n, end=n + 1) for n in range(200)]
store.write_document(Document(document_id="a", source="a", content_hash="0"), "x" * 200, chunks, recipe="r",
                     references={chunk.chunk_id: [] for chunk in chunks},
                     vectors={chunk.chunk_id: vector(chunk.ordinal) for chunk in chunks})

def ask(derived):
    config = DenseConfig()
    return [
        derived.bm25().search("word7", 1)[0].chunk_id,
        derived.vectors("dense", embedder="e", config=config).search(vector(7).dense, 1)[0].chunk_id,
        derived.vectors("sparse", embedder="e", config=config).search({"7": 1.0}, 1)[0].chunk_id,
    ]

ask(Derived(store, folder / "derived", lambda keep: keep()))
derived = Derived(store, folder / "derived", lambda keep: keep())  # maps what the first one has saved
for length in (0, 4096, 1):
    assert ask(derived) == ["c7"] * 3
    for path in (folder / "derived").glob("*/data-*/*"):
        os.truncate(path, min(length, path.stat().st_size))
assert ask(derived) == ["c7"] * 3
readonly = Derived(store, folder / "derived", lambda keep: None)
assert ask(readonly) == ["c7"] * 3
print("ok")
"""


def test_mapped_files_that_are_cut(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "index")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
