"""Readers in processes of their own, forked, beside a writer that makes the map grow.

    python tests/support/reader.py INDEX

Every reader opens the store for itself, and checks all that it finds for as long as the writer writes.
"""

import json
import multiprocessing
import sys
from multiprocessing.synchronize import Event

import torch
from expected import kv_of, operation, perform
from storekit import equal, identity

from ragkv.store import Store

OPERATIONS = 40
MAP = 128 << 10


def read(path: str, started: Event, done: Event) -> None:
    """Until the writer has ended: every chunk that is found is its document's, every KV is whole."""
    torch.set_num_threads(1)
    kvs = maps = 0
    with Store.open(path, readonly=True) as store:
        first = store.stats().map_bytes
        while True:
            last = done.is_set()  # one more look after the end
            for stored in store.documents():
                for chunk in store.chunks(stored.document.document_id):
                    of = identity(*chunk.token_ids)
                    kv = store.get_kv(of)
                    if kv is not None:  # else replaced meanwhile
                        assert equal(kv, kv_of(of, int(kv.keys[0][0, 0, 0])))
                        kvs += 1
            started.set()
            if last:
                break
        maps = store.stats().map_bytes > first
    assert kvs, "nothing was read"
    assert maps, "no growth was seen"


def main() -> None:
    path = sys.argv[1]
    Store.create(path, map_size=MAP).close()
    processes, seen = [], []
    context = multiprocessing.get_context("fork")
    for _ in range(2):
        started, done = context.Event(), context.Event()
        processes.append(context.Process(target=read, args=(path, started, done)))
        processes[-1].start()
        seen.append((started, done))
    for started, _ in seen:
        assert started.wait(600)
    with Store.open(path) as store, store.writing("ragkv ingest"):
        for number in range(OPERATIONS):
            perform(store, operation(number))
        perform(store, operation(OPERATIONS, "write") | {"tokens": [[1, 2, 3]]})
        grown = store.stats().map_bytes
    for _, done in seen:
        done.set()
    codes = []
    for process in processes:
        process.join(600)
        codes.append(process.exitcode)
    print(json.dumps({"codes": codes, "grown": grown}))


if __name__ == "__main__":
    main()
