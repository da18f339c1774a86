"""Kill `ragkv ingest` and compare the result of the last, undisturbed run with an index that was never disturbed.

python tests/support/ingestcrash.py --kills 20 --seed 1

A command sends the signal to itself at the n-th of `EVENTS`, so no kill depends on the machine's speed; in long runs
some come a moment later, from another thread.
"""

import argparse
import hashlib
import json
import mmap
import os
import random
import shutil
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from command import fork_command
from crashtest import Child
from loaded import preload
from outcome import Result
from storecheck import problems

import ragkv.ingest.ingester as ingester
from ragkv.config import LLAMA_CPP, load_config
from ragkv.ingest.ingester import Ingester
from ragkv.store import Store
from ragkv.store.tables import INDEX_OWNER, parse_document

QUESTION = "Who founded the company?"
EVENTS = ((Ingester, "_add"), (Ingester, "_commit"), (Store, "stage_kv"), (Store, "write_changes"))
SEEN = mmap.mmap(-1, 8)
"""Counts a command's events, before and after each call; shared with the command's process."""


def arm(at: int, number: signal.Signals, delay: float = 0) -> None:
    """From now on, commands send themselves this signal at event number `at`, or `delay` seconds after it."""
    SEEN[:] = bytes(8)

    def tick() -> None:
        seen = int.from_bytes(SEEN[:], "little") + 1
        SEEN[:] = seen.to_bytes(8, "little")
        if seen == at and delay:
            threading.Timer(delay, os.kill, (os.getpid(), number)).start()
        elif seen == at:
            os.kill(os.getpid(), number)

    for (owner, name), method in zip(EVENTS, METHODS, strict=True):

        def watched(*given: Any, method: Callable[..., Any] = method, **more: Any) -> Any:
            tick()
            result = method(*given, **more)
            tick()
            return result

        setattr(owner, name, watched)


METHODS = [getattr(owner, name) for owner, name in EVENTS]


def corpus(folder: Path, documents: int) -> None:
    """Documents for several batches of encoding and of commits; always the same."""
    folder.mkdir()
    draw = random.Random(3)
    words = ["valve", "bolt", "mill", "works", "founded", "company", "Varn", "Halden", "Oskel", "made", "sells"]
    for n in range(documents):
        lines = (" ".join(draw.choices(words, k=12)).capitalize() + "." for _ in range(draw.randrange(1, 12)))
        (folder / f"{n:02}.txt").write_text(f"Who founded company {n}? " + "\n".join(lines))


def contents(index: Path) -> dict[str, Any]:
    """The index's content, byte by byte, without times; of a state of llama.cpp, whose header names the sequence that
    it was read from, only that it is there.
    """
    opaque = load_config(index).executor == LLAMA_CPP
    held: dict[str, Any] = {}
    with Store.open(index, readonly=True) as store:
        assert not problems(store), problems(store)
        assert not list(store.maintenance.orphans())
        with store._live().read() as txn:
            own = set(txn.values("needs", INDEX_OWNER))  # the prefix's KV, which a question stores
            for table in ("texts", "chunks", "places", "kv", "segments"):
                rows = {key.hex(): bytes(value) for key, value in txn.scan(table) if key[:32] not in own}
                same = opaque and table in ("kv", "segments")
                held |= {f"{table} {key}": "" if same else hashlib.sha256(row).hexdigest() for key, row in rows.items()}
            stored = [parse_document(value) for _, value in txn.scan("documents")]
        held["documents"] = [(s.document.document_id, s.document.content_hash, s.recipe, s.chunks) for s in stored]
    return held


def child(work: Any, *arguments: Any) -> Any:
    """Compute `work` in a separate process: this one never opens a store."""
    process = Child.fork(lambda first, say, *rest: say(work(first, *rest)), *arguments)
    assert process.end() == 0, process.lines
    return process.lines[0]


def check(index: Path) -> list[str]:
    with Store.create(index, exist_ok=True) as store:
        return problems(store)


def held(index: Path) -> int:
    """The number of documents in the index."""
    with Store.open(index, readonly=True) as store:
        return store.stats().documents


def same(index: Path, calm: Path) -> None:
    """Check that both have the same content, byte by byte."""
    left, right = (child(contents, path) for path in (index, calm))
    differ = {key for key in left.keys() | right.keys() if left.get(key) != right.get(key)}
    assert not differ, f"{len(differ)} rows of {len(right)} differ: {sorted(differ)[:9]}"
    arm(0, signal.SIGKILL)
    texts = [json.loads(ask(path).out)["answer"] for path in (index, calm)]
    assert texts[0] == texts[1], texts


def ask(index: Path) -> Result:
    return fork_command("query", QUESTION, "--index", index, "--engine", "ape", "--max-new-tokens", "4", "--json")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--model", default="mini", help="a .gguf file: llama.cpp runs it")
    options = parser.parse_args()
    if options.model == "mini":
        preload("mini")
    ingester.BATCH_TOKENS = 128  # many commits in the children
    draw, count = random.Random(options.seed), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        documents, index, calm = Path(folder) / "documents", Path(folder) / "index", Path(folder) / "calm"
        corpus(documents, options.documents)
        ingest = ("ingest", documents, "--quiet", "--model", options.model, "--index")
        arm(0, signal.SIGKILL)
        first = fork_command(*ingest, calm)
        assert first.code == 0, first.err
        events = int.from_bytes(SEEN[:], "little")
        left = [signal.SIGINT] + [signal.SIGKILL] * options.kills
        draw.shuffle(left)
        while left:
            late = options.kills >= 10 and left[-1] is signal.SIGKILL and draw.random() < 0.5
            arm(draw.randrange(events // 4, events // 2), left[-1], draw.uniform(0, 0.2) if late else 0)
            done = fork_command(*ingest, index)
            if done.code == 0:  # it ended before the event: start again
                same(index, calm)
                shutil.rmtree(index)
                count["comparisons"] += 1
                continue
            count[f"ended by {done.code}"] += 1
            if left.pop() is signal.SIGINT:
                assert done.code == 130, done
                assert "Traceback" not in done.err, done.err
                assert len(done.err.splitlines()) == 1, done.err
            if not (index / "ragkv.toml").exists():
                continue
            assert child(check, index) == []
            count["documents left"] += child(held, index)
            if options.kills < 10 and left:
                continue  # in short runs one question is enough
            arm(0, signal.SIGKILL)
            answer = ask(index)
            assert "Traceback" not in answer.err, answer.err
            if answer.code:
                assert "holds no document yet" in answer.err, answer.err
                count["nothing to ask yet"] += 1
            else:
                assert json.loads(answer.out)["sources"]
                count["answered"] += 1
        arm(0, signal.SIGKILL)
        last = fork_command(*ingest, index)
        assert last.code == 0, last.err
        same(index, calm)
        count["comparisons"] += 1
    print(json.dumps(count | {"events": events}))


if __name__ == "__main__":
    main()
