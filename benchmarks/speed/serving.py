"""How much does a server gain by answering requests together, and does it stay stable under mixed load?

Baseline: the same questions to the same server, one after another. A Llama of 100M parameters with random weights in
float32, in which answers do not depend on other requests; chunks of 64 words with stored KV. The clients run in another
process on the same machine, on an HTTP client of the standard library that only understands this server. The mixed load
asks, disconnects, uploads and deletes for some minutes, drawn from a seed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import numpy as np
import typer

from ragkv.benchmarks.speed.report import (
    BenchRow,
    Corpus,
    OnStep,
    Quick,
    Report,
    machine,
    make_language_model,
    own_memory,
    unseen,
    versions,
)
from ragkv.cli.options import Device
from ragkv.errors import RagkvError

_JSON = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOutcome:
    """The outcome of a streamed question. `first`: the seconds until the first piece of text.

    `error` is the server's, in place of the answer or within it.
    """

    status: int
    text: str
    first: float
    tokens: int
    error: str | None


_V1_NAMES = {"max_new_tokens": "max_tokens", "top_k": "top_k_chunks"}
"""The parameter names of `/v1` that differ from those of `/api`."""


class LoadClient:
    """Asks the server at `url`, such as http://127.0.0.1:8080."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80

    async def call(self, method: str, path: str, body: bytes = b"", kind: str = _JSON) -> tuple[int, Any]:
        """The status and the JSON of the answer."""
        async with self._asked(method, path, body, kind) as (status, blocks):
            return status, json.loads(b"".join([block async for block in blocks]))

    async def query(self, index: str, asked: dict[str, Any]) -> tuple[int, Any]:
        """A question that is answered as a whole."""
        return await self.call("POST", f"/api/indexes/{index}/query", json.dumps(asked).encode())

    async def upload(self, index: str, name: str, text: str) -> tuple[int, Any]:
        """A text file as a form."""
        edge = uuid.uuid4().hex
        head = f'--{edge}\r\ncontent-disposition: form-data; name="files"; filename="{name}"\r\n\r\n'
        body = f"{head}{text}\r\n--{edge}--\r\n".encode()
        return await self.call("POST", f"/api/indexes/{index}/documents", body, f"multipart/form-data; boundary={edge}")

    async def stream(self, index: str, asked: dict[str, Any], *, leave: int | None = None) -> StreamOutcome:
        """A question that is answered piece by piece; the client goes away after `leave` pieces."""
        body = {
            "model": index,
            "messages": [{"role": "user", "content": asked["question"]}],
            "stream": True,
            "stream_options": {"include_usage": True},
            **{_V1_NAMES.get(name, name): value for name, value in asked.items() if name != "question"},
        }
        start = time.perf_counter()
        first, texts, tokens, error = 0.0, [], 0, None
        async with self._asked("POST", "/v1/chat/completions", json.dumps(body).encode()) as (status, blocks):
            if status != 200:
                found = json.loads(b"".join([block async for block in blocks]))
                error = found["error"]["message"]
            else:
                async for event in _events(blocks):
                    error = event.get("error", {}).get("message", error)
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                    for choice in event.get("choices", ()):
                        if text := choice["delta"].get("content"):
                            first = first or time.perf_counter() - start
                            texts.append(text)
                    if leave is not None and len(texts) >= leave:
                        break
        return StreamOutcome(status=status, text="".join(texts), first=first, tokens=tokens, error=error)

    @asynccontextmanager
    async def _asked(
        self, method: str, path: str, body: bytes, kind: str = _JSON
    ) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            head = f"{method} {path} HTTP/1.1\r\nhost: {self._host}\r\nconnection: close\r\ncontent-type: {kind}\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            headers = (await reader.readuntil(b"\r\n\r\n")).lower()
            status = int(headers.split(b" ", 2)[1])
            yield status, _blocks(reader, chunked=b"transfer-encoding: chunked" in headers)
        finally:
            writer.close()


async def _blocks(reader: asyncio.StreamReader, *, chunked: bool) -> AsyncIterator[bytes]:
    """The body as it comes. A body that ends early is an error."""
    if not chunked:
        yield await reader.read()
        return
    while size := int(await reader.readline(), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readline()


async def _events(blocks: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The objects of a stream, until [DONE]."""
    left = b""
    async for block in blocks:
        *whole, left = (left + block).split(b"\n\n")
        for event in whole:
            if event != b"data: [DONE]":
                yield json.loads(event.removeprefix(b"data: "))


CLIENTS = 8
MOST_UPLOADED = 12
"""Uploaded documents that stay; with more, one is deleted first."""
_SHARES = {"stream": 45, "query": 20, "leave": 15, "upload": 10, "delete": 10}


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownAnswer:
    """A question to an index, and its answer when it is asked alone."""

    index: str
    asked: dict[str, Any]
    text: str


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The outcome of a run. `errors` are sentences; `memory` is the server's memory in MB, every second."""

    done: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return self.done.total()


async def run_mixed(
    client: LoadClient,
    known: list[KnownAnswer],
    *,
    seconds: float,
    seed: int,
    text: Callable[[int], str],
    memory: Callable[[], float],
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
    def __init__(self, client: LoadClient, known: list[KnownAnswer], text: Callable[[int], str], until: float) -> None:
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
        payload = await self._client.stream(known.index, known.asked)
        self._require(payload.status == 200 and payload.error is None, "stream", payload.status, payload.error)
        self._compare(known, payload.text)

    async def _query(self, draw: random.Random) -> None:
        known = draw.choice(self._known)
        status, payload = await self._client.query(known.index, known.asked)
        self._require(status == 200, "query", status, payload)
        if status == 200:
            self._compare(known, payload["answer"])

    async def _leave(self, draw: random.Random) -> None:
        known = draw.choice(self._known)
        payload = await self._client.stream(known.index, known.asked, leave=draw.randrange(4))
        self._require(payload.status == 200, "leave", payload.status, payload.error)

    async def _upload(self, draw: random.Random) -> None:
        if len(self._uploaded) >= MOST_UPLOADED:
            await self._delete(draw)
        self._number += 1
        name, text = f"new-{self._number}.txt", self._text(self._number)
        status, payload = await self._client.upload("changing", name, text)
        if status == 429:  # the queue of jobs is full: the client should retry later
            self.outcome.done["upload, refused for now"] += 1
            return
        self._require(status == 202, "upload", status, payload)
        job = payload["job"]
        while job["state"] in ("queued", "running"):
            await asyncio.sleep(0.1)
            status, payload = await self._client.call("GET", f"/api/indexes/changing/jobs/{job['id']}")
            job = payload["job"]
        self._require(job["state"] == "done", "job", job["state"], job["error"])
        [document] = job["report"]["added"]
        self._uploaded.append(document)
        asked = {"question": text, "engine": "block", "max_new_tokens": 4, "where": [f"source={name}"]}
        status, payload = await self._client.query("changing", asked)
        found = {source["document"] for source in payload.get("sources", ())}
        if document in self._uploaded:  # it was not deleted meanwhile
            self._require(found == {name}, "the uploaded document is not found", status, found)

    async def _delete(self, draw: random.Random) -> None:
        if not self._uploaded:
            return
        document = self._uploaded.pop(draw.randrange(len(self._uploaded)))
        while True:
            path = f"/api/indexes/changing/documents/{quote(document, safe='')}"
            status, payload = await self._client.call("DELETE", path)
            if status != 409:
                break
            self.outcome.done["delete, refused for now"] += 1  # a job writes
            await asyncio.sleep(0.2)
        self._require(status == 200, "delete", status, payload)

    def _compare(self, known: KnownAnswer, text: str) -> None:
        if text != known.text:
            self.outcome.different.append(f"{known.asked}: {text!r}, alone {known.text!r}")

    def _require(self, good: bool, *what: object) -> None:
        if not good:
            self.outcome.errors.append(": ".join(map(str, what)))


SHAPE: Mapping[str, float] = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "initializer_range": 0.05,  # so that answers differ
}
ENGINES = ("block", "ape", "pced", "full")
NEW_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Server:
    """A running server: its address and its process."""

    url: str
    pid: int

    def processor(self) -> float:
        """Seconds of processor time so far; 0 where the system does not tell."""
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return 0.0
        user, system = text.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serve(indexes: Mapping[str, Path], device: str | None) -> Iterator[Server]:
    """`ragkv serve` over these indexes. RagkvError if it does not start, or does not end properly."""
    command = [sys.executable, "-c", "from ragkv.cli.main import main; main()", "serve", "--json", "--port", "0"]
    command += [word for name, folder in indexes.items() for word in ("--index", f"{name}={folder}")]
    command += [] if device is None else ["--device", device]
    log = next(iter(indexes.values())).parent / "serve.log"
    with log.open("wb") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as process:
        try:
            assert process.stdout is not None
            if not (line := process.stdout.readline()):
                raise RagkvError(f"The server did not come up: {log.read_text(errors='replace')[-2000:]}")
            yield Server(json.loads(line)["url"].removesuffix("/v1"), process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait()
    if code or "Traceback" in log.read_text(errors="replace"):
        raise RagkvError(f"The server ended with status {code}: {log.read_text(errors='replace')[-2000:]}")


Serve = Callable[[Mapping[str, Path], str | None], AbstractContextManager[Server]]


def measure_serve(
    streams: Annotated[int, typer.Option(help="Questions asked at the same time.", min=1)] = 32,
    rounds: Annotated[int, typer.Option(help="Rounds; medians are shown.", min=1)] = 3,
    minutes: Annotated[
        float, typer.Option(help="Then this many minutes of questions, uploads, deletes and clients that leave.", min=0)
    ] = 0,
    seed: Annotated[int, typer.Option(help="What the mixed load is drawn from.")] = 0,
    quick: Quick = False,
    device: Device = None,
    on_step: OnStep = unseen,
    documents: int = 8,
    shape: Mapping[str, float] = SHAPE,
    serve: Serve = serve,
) -> Report:
    """Many streams from one `ragkv serve`, compared with the same questions one after another.

    Errors, and answers unlike those of a single question, are counted. Example: `ragkv bench serve --minutes 10`
    """
    streams, rounds, documents = (8, 1, 2) if quick else (streams, rounds, documents)
    corpus = Corpus(documents * 8)
    with tempfile.TemporaryDirectory(prefix="ragkv-bench-") as name:
        on_step("making the model and two indexes …")
        indexes = _indexes(Path(name), corpus, shape, device)
        with serve(indexes, device) as server:
            client = LoadClient(server.url)
            rows = _together(client, server, corpus, streams, rounds, on_step)
            if minutes:
                known = asyncio.run(_alone(client, corpus, on_step))
                outcome = asyncio.run(
                    run_mixed(
                        client,
                        known,
                        seconds=60 * minutes,
                        seed=seed,
                        text=lambda number: (
                            replace(corpus, size=8 * (1001 + number)).document(1000 + number).chunks[0].text
                        ),
                        memory=lambda: own_memory(server.pid),
                        on_second=lambda at, found: _notify(on_step, at, found),
                    )
                )
                rows += _mixed_rows(outcome, minutes, on_step)
    packages = versions("fastapi", "uvicorn")
    return Report(bench="serve", machine=machine("cpu"), versions=packages, rows=tuple(rows))


def _indexes(folder: Path, corpus: Corpus, shape: Mapping[str, float], device: str | None) -> dict[str, Path]:
    """An index that does not change, and one that does, whose own documents have one chunk each."""
    from ragkv.pipeline import RagKV

    (model := folder / "model").mkdir()
    make_language_model(model, **shape)
    every = [corpus.document(number) for number in range(corpus.documents)]
    single = [replace(each, chunks=each.chunks[:1], text=each.chunks[0].text) for each in every]
    for name, content in (("fixed", every), ("changing", single)):
        with RagKV.create(folder / name, model=str(model), embedder="none", dtype="float32", device=device) as rag:
            rag.add_chunks(content)
    return {"fixed": folder / "fixed", "changing": folder / "changing"}


def _together(
    client: LoadClient, server: Server, corpus: Corpus, streams: int, rounds: int, on_step: OnStep
) -> list[BenchRow]:
    """The same questions one after another and together, in turns; a first turn warms up."""
    questions = [f"{corpus.question(at % corpus.documents)} {at}" for at in range(streams)]
    asked = [{"question": each, "engine": "block", "top_k": 4, "max_new_tokens": NEW_TOKENS} for each in questions]

    async def one_by_one() -> list[StreamOutcome]:
        return [await client.stream("fixed", each) for each in asked]

    async def at_once() -> list[StreamOutcome]:
        return await asyncio.gather(*(client.stream("fixed", each) for each in asked))

    times: dict[str, list[tuple[float, float]]] = {"alone": [], "together": []}
    payload: dict[str, list[StreamOutcome]] = {"alone": [], "together": []}
    for turn in range(rounds + 1):
        on_step(f"{streams} questions, one after another and together, turn {turn + 1} of {rounds + 1} …")
        for name, work in (("alone", one_by_one), ("together", at_once)):
            start, busy = time.perf_counter(), server.processor()
            found = asyncio.run(work())
            if turn:
                times[name].append((time.perf_counter() - start, server.processor() - busy))
                payload[name] += found
    errors = [each.error or str(each.status) for each in payload["together"] if each.error or each.status != 200]
    same = sum(one.text == other.text for one, other in zip(payload["alone"], payload["together"], strict=True))
    for error in errors[:5]:
        on_step(f"error: {error}")
    alone, together = (statistics.median(clock for clock, _ in times[name]) for name in ("alone", "together"))
    busy, busier = (statistics.median(used for _, used in times[name]) for name in ("alone", "together"))
    tokens = sum(each.tokens for each in payload["together"]) / rounds
    waits = [float(np.percentile([1000 * each.first for each in payload[name]], 95)) for name in ("alone", "together")]
    many, few = f"{streams} streams", "one after another"
    return [
        BenchRow.of(f"{many}: tokens per second", tokens / together, "1/s", few, tokens / alone, alone / together),
        BenchRow.of(f"{many}: processor time", busier, "s", few, busy, busy / busier if busier else 1.0),
        BenchRow.of(f"{many}: first token, p95", waits[1], "ms", few, waits[0], waits[0] / waits[1]),
        _count_row(f"{many}: errors", len(errors), len(payload["together"])),
        _count_row(f"{many}: answers unlike those alone", len(payload["together"]) - same, len(payload["together"])),
    ]


async def _alone(client: LoadClient, corpus: Corpus, on_step: OnStep) -> list[KnownAnswer]:
    """Questions with their answers when they are asked alone, before anything changes.

    In the changing index, a question is about one document, because other documents change the order of chunks.
    """
    known = []
    for number in range(corpus.documents):
        on_step(f"questions alone, document {number + 1} of {corpus.documents} …")
        for engine in ENGINES:
            asked = {"question": corpus.question(number), "engine": engine, "max_new_tokens": NEW_TOKENS}
            source = f"source={corpus.document_id(number)}.txt"
            for index, more in (("fixed", {"top_k": 4}), ("changing", {"where": [source]})):
                status, payload = await client.query(index, {**asked, **more})
                if status != 200:
                    raise RagkvError(f"A question was not answered: {payload}")
                known.append(KnownAnswer(index=index, asked={**asked, **more}, text=payload["answer"]))
    return known


def _mixed_rows(outcome: Outcome, minutes: float, on_step: OnStep) -> list[BenchRow]:
    for line in [*outcome.errors[:5], *outcome.different[:5]]:
        on_step(f"error: {line}")
    on_step(", ".join(f"{number:,} {name}" for name, number in sorted(outcome.done.items())))
    third = max(1, len(outcome.memory) // 3)
    first, last = (statistics.median(part) for part in (outcome.memory[:third], outcome.memory[-third:]))
    name = f"{minutes:g} minutes mixed"
    return [
        BenchRow.of(f"{name}: memory, last third", last, "MB", "first third", first, first / last if last else 1.0),
        _count_row(f"{name}: errors", len(outcome.errors), outcome.requests),
        _count_row(f"{name}: answers unlike those alone", len(outcome.different), outcome.requests),
    ]


def _notify(on_step: OnStep, at: float, found: Outcome) -> None:
    if round(at) % 30 == 0 and at > 1:
        on_step(f"{at:.0f} s: {found.requests:,} requests, {len(found.errors)} errors, {found.memory[-1]:.0f} MB")


def _count_row(name: str, bad: int, of: int) -> BenchRow:
    """`bad` of all; the ratio is the share of good ones."""
    return BenchRow.of(name, bad, "", "requests", of, (of - bad) / of if of else 1.0)
