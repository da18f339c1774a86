"""Ingest documents once, then ask. Run me first: 02 to 05 and 07 to 09 open the index that I make.

`RAGKV_INDEX` names its folder, ./example-index without it. A real model is one argument away: model="Qwen/Qwen3-4B".
"""

import os
from pathlib import Path

from ragkv import RagKV

INDEX = Path(os.environ.get("RAGKV_INDEX", "example-index"))
CORPUS = Path(__file__).parent / "corpus"

made = (INDEX / "ragkv.toml").exists()
with RagKV.open(INDEX) if made else RagKV.create(INDEX, model="mini") as rag:
    report = rag.ingest(CORPUS)  # again: only what changed
    print(f"{len(report.added)} documents added, {len(report.unchanged)} unchanged, {report.chunks} chunks encoded")

    answer = rag.query("How many people work at Linodyne Paper?", top_k=4)
    print(f"{answer.text} ({answer.kv.hits} of {len(answer.sources)} chunks from stored KV)")
    for source in answer.sources:
        page = "" if source.page is None else f", page {source.page}"
        print(f"  {source.score:.2f} {source.document}{page}")
