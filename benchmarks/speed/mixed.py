"""Clients that ask, leave, upload and delete for some minutes, drawn from a seed, and what they found."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from ragkv.benchmarks.speed.loadclient import LoadClient

__all__ = ["Known", "Outcome", "run_mixed"]

CLIENTS = 8
MOST_UPLOADED = 12
"""Uploaded documents that stay; with more, one is deleted first."""
_SHARES = {"stream": 45, "query": 20, "leave": 15, "upload": 10, "delete": 10}


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A question to an index, and the answer that it has when it is asked alone."""

    index: str
    asked: dict[str, Any]
    text: str


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What happened. `errors` are sentences; `memory` are bytes of the server, one a second."""

    done: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return self.done.total()


async def run_mixed(
    client: LoadClient,
    known: list[Known],
    *,
    seconds: float,
    seed: int,
    text: Callable[[int], str],
    memory: Callable[[], int],
    on_second: Callable[[float, Outcome], None] = lambda done, outcome: None,
) -> Outcome:
    """Run the clients. `text(n)` is the n-th text that is uploaded, to the index "changing"."""
    load = _Load(client, known, text, time.monotonic() + seconds)
    workers = [asyncio.create_task(load.work(random.Random(f"{seed}-{number}"))) for number in range(CLIENTS)]
    pending: set[asyncio.Task[None]] = set(workers)
    start = time.monotonic()
    while pending:
        load.outcome.memory.append(memory())
        on_second(time.monotonic() - start, load.outcome)
        _, pending = await asyncio.wait(pending, timeout=1.0)
    for worker in workers:
        worker.result()
    return load.outcome


class _Load:
    def __init__(self, client: LoadClient, known: list[Known], text: Callable[[int], str], until: float) -> None:
        self.outcome = Outcome()
        self._client = client
        self._known = known
        self._text = text
        self._until = until
        self._uploaded: list[str] = []
        self._number = 0

    async def work(self, draw: random.Random) -> None:
        acts: dict[str, Callable[[random.Random], Awaitable[None]]] = {
            "stream": self._stream,
            "query": self._query,
            "leave": self._leave,
            "upload": self._upload,
            "delete": self._delete,
        }
        while time.monotonic() < self._until:
            [name] = draw.choices(list(_SHARES), list(_SHARES.values()))
            try:
                await acts[name](draw)
                self.outcome.done[name] += 1
            except (OSError, EOFError, ValueError, KeyError) as error:
                self.outcome.errors.append(f"{name}: {type(error).__name__}: {error}")

    async def _stream(self, draw: random.Random) -> None:
        known = draw.choice(self._known)
        told = await self._client.stream(known.index, known.asked)
        self._require(told.status == 200 and told.error is None, "stream", told.status, told.error)
        self._compare(known, told.text)

    async def _query(self, draw: random.Random) -> None:
        known = draw.choice(self._known)
        status, told = await self._client.query(known.index, known.asked)
        self._require(status == 200, "query", status, told)
        if status == 200:
            self._compare(known, told["answer"])

    async def _leave(self, draw: random.Random) -> None:
        known = draw.choice(self._known)
        told = await self._client.stream(known.index, known.asked, leave=draw.randrange(4))
        self._require(told.status == 200, "leave", told.status, told.error)

    async def _upload(self, draw: random.Random) -> None:
        if len(self._uploaded) >= MOST_UPLOADED:
            await self._delete(draw)
        self._number += 1
        name, text = f"new-{self._number}.txt", self._text(self._number)
        status, told = await self._client.upload("changing", name, text)
        if status == 429:  # the queue of jobs is full: what a client is told to do is to come again
            self.outcome.done["upload, told to come again"] += 1
            return
        self._require(status == 202, "upload", status, told)
        job = told["job"]
        while job["state"] in ("queued", "running"):
            await asyncio.sleep(0.1)
            status, told = await self._client.call("GET", f"/api/indexes/changing/jobs/{job['id']}")
            job = told["job"]
        self._require(job["state"] == "done", "job", job["state"], job["error"])
        [document] = job["report"]["added"]
        self._uploaded.append(document)
        asked = {"question": text, "engine": "block", "max_new_tokens": 4, "where": [f"source={name}"]}
        status, told = await self._client.query("changing", asked)
        found = {source["document"] for source in told.get("sources", ())}
        if document in self._uploaded:  # nobody deleted it meanwhile
            self._require(found == {name}, "the uploaded document is not found", status, found)

    async def _delete(self, draw: random.Random) -> None:
        if not self._uploaded:
            return
        document = self._uploaded.pop(draw.randrange(len(self._uploaded)))
        while True:
            path = f"/api/indexes/changing/documents/{quote(document, safe='')}"
            status, told = await self._client.call("DELETE", path)
            if status != 409:
                break
            self.outcome.done["delete, told to come again"] += 1  # a job writes
            await asyncio.sleep(0.2)
        self._require(status == 200, "delete", status, told)

    def _compare(self, known: Known, text: str) -> None:
        if text != known.text:
            self.outcome.different.append(f"{known.asked}: {text!r}, alone {known.text!r}")

    def _require(self, good: bool, *what: object) -> None:
        if not good:
            self.outcome.errors.append(": ".join(map(str, what)))
