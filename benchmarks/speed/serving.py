"""How much does a server gain by answering together, and does it stay as it is under mixed load?

Baseline: the same questions to the same server, one after another. A Llama of 100M parameters with random weights in
float32, in which answers do not depend on who else asks; chunks of 64 words, their KV stored. The clients are in
another process than the server, on the same machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ragkv.benchmarks.speed.corpus import Corpus, make_language_model
from ragkv.benchmarks.speed.loadclient import LoadClient, Told
from ragkv.benchmarks.speed.mixed import Known, Outcome, run_mixed
from ragkv.benchmarks.speed.report import Report, Row, machine, versions
from ragkv.errors import RagkvError

__all__ = ["SHAPE", "Server", "measure", "serve"]

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
    """A running server: its address, its process, and where its log is."""

    url: str
    pid: int
    log: Path

    def memory(self) -> int:
        """Bytes of its own, without the pages of files that it has mapped; 0 where the system does not tell."""
        return next((kb * 1024 for name, kb in _numbers(self.pid) if name == "RssAnon:"), 0)

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
    """`ragkv serve` over these indexes. RagkvError when it does not come up, or does not end as it should."""
    command = [sys.executable, "-c", "from ragkv.cli.main import main; main()", "serve", "--json", "--port", "0"]
    command += [word for name, folder in indexes.items() for word in ("--index", f"{name}={folder}")]
    command += [] if device is None else ["--device", device]
    log = next(iter(indexes.values())).parent / "serve.log"
    with log.open("wb") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as process:
        try:
            assert process.stdout is not None
            if not (line := process.stdout.readline()):
                raise RagkvError(f"The server did not come up: {log.read_text(errors='replace')[-2000:]}")
            yield Server(json.loads(line)["url"].removesuffix("/v1"), process.pid, log)
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait()
    if code or "Traceback" in log.read_text(errors="replace"):
        raise RagkvError(f"The server ended with status {code}: {log.read_text(errors='replace')[-2000:]}")


Serve = Callable[[Mapping[str, Path], str | None], AbstractContextManager[Server]]


def measure(
    streams: int = 32,
    *,
    rounds: int = 3,
    minutes: float = 0.0,
    seed: int = 0,
    documents: int = 8,
    device: str | None = None,
    shape: Mapping[str, float] = SHAPE,
    serve: Serve = serve,
    on_step: Callable[[str], None] | None = None,
) -> Report:
    """`streams` questions together and one after another, then `minutes` of mixed load drawn from `seed`."""
    say = on_step or (lambda _: None)
    corpus = Corpus(documents * 8)
    with tempfile.TemporaryDirectory(prefix="ragkv-bench-") as name:
        say("making the model and two indexes …")
        indexes = _indexes(Path(name), corpus, shape, device)
        with serve(indexes, device) as server:
            client = LoadClient(server.url)
            rows = _together(client, server, corpus, streams, rounds, say)
            if minutes:
                known = asyncio.run(_alone(client, corpus, say))
                outcome = asyncio.run(
                    run_mixed(
                        client,
                        known,
                        seconds=60 * minutes,
                        seed=seed,
                        text=lambda number: _one_chunk(corpus, 1000 + number)[0].text,
                        memory=server.memory,
                        on_second=lambda at, found: _tell(say, at, found),
                    )
                )
                rows += _mixed_rows(outcome, minutes, say)
    packages = versions("fastapi", "uvicorn")
    return Report(bench="serve", machine=machine("cpu"), versions=packages, rows=tuple(rows))


def _indexes(folder: Path, corpus: Corpus, shape: Mapping[str, float], device: str | None) -> dict[str, Path]:
    """An index that stays as it is, and one that changes, whose own documents have one chunk each."""
    from ragkv.pipeline import RagKV

    (model := folder / "model").mkdir()
    make_language_model(model, **shape)
    every = [corpus.document(number) for number in range(corpus.documents)]
    single = [replace(each, chunks=each.chunks[:1], text=each.chunks[0].text) for each in every]
    for name, content in (("fixed", every), ("changing", single)):
        with RagKV.create(folder / name, model=str(model), embedder="none", dtype="float32", device=device) as rag:
            rag.add_chunks(content)
    return {"fixed": folder / "fixed", "changing": folder / "changing"}


def _one_chunk(corpus: Corpus, number: int) -> Any:
    return replace(corpus, size=(number + 1) * 8).document(number).chunks


def _together(
    client: LoadClient, server: Server, corpus: Corpus, streams: int, rounds: int, say: Callable[[str], None]
) -> list[Row]:
    """The same questions one after another and together, in turns; a first turn warms up."""
    questions = [f"{corpus.question(at % corpus.documents)} {at}" for at in range(streams)]
    asked = [{"question": each, "engine": "block", "top_k": 4, "max_new_tokens": NEW_TOKENS} for each in questions]

    async def one_by_one() -> list[Told]:
        return [await client.stream("fixed", each) for each in asked]

    async def at_once() -> list[Told]:
        return await asyncio.gather(*(client.stream("fixed", each) for each in asked))

    times: dict[str, list[tuple[float, float]]] = {"alone": [], "together": []}
    told: dict[str, list[Told]] = {"alone": [], "together": []}
    for turn in range(rounds + 1):
        say(f"{streams} questions, one after another and together, turn {turn + 1} of {rounds + 1} …")
        for name, work in (("alone", one_by_one), ("together", at_once)):
            start, busy = time.perf_counter(), server.processor()
            found = asyncio.run(work())
            if turn:
                times[name].append((time.perf_counter() - start, server.processor() - busy))
                told[name] += found
    errors = [each.error or str(each.status) for each in told["together"] if each.error or each.status != 200]
    same = sum(one.text == other.text for one, other in zip(told["alone"], told["together"], strict=True))
    for error in errors[:5]:
        say(f"error: {error}")
    alone, together = (statistics.median(clock for clock, _ in times[name]) for name in ("alone", "together"))
    busy, busier = (statistics.median(used for _, used in times[name]) for name in ("alone", "together"))
    tokens = sum(each.tokens for each in told["together"]) / rounds
    waits = [_percentile([each.first * 1000 for each in told[name]], 0.95) for name in ("alone", "together")]
    many, few = f"{streams} streams", "one after another"
    return [
        _row(f"{many}: tokens per second", tokens / together, "1/s", few, tokens / alone, alone / together),
        _row(f"{many}: processor time", busier, "s", few, busy, busy / busier if busier else 1.0),
        _row(f"{many}: first token, p95", waits[1], "ms", few, waits[0], waits[0] / waits[1]),
        _count_row(f"{many}: errors", len(errors), len(told["together"])),
        _count_row(f"{many}: answers unlike those alone", len(told["together"]) - same, len(told["together"])),
    ]


async def _alone(client: LoadClient, corpus: Corpus, say: Callable[[str], None]) -> list[Known]:
    """Questions with the answers that they have when nobody else asks, and before anything changes.

    In the index that changes, a question is about one document: what others hold changes the order of chunks.
    """
    known = []
    for number in range(corpus.documents):
        say(f"questions alone, document {number + 1} of {corpus.documents} …")
        for engine in ENGINES:
            asked = {"question": corpus.question(number), "engine": engine, "max_new_tokens": NEW_TOKENS}
            source = f"source={corpus.document_id(number)}.txt"
            for index, more in (("fixed", {"top_k": 4}), ("changing", {"where": [source]})):
                status, told = await client.query(index, {**asked, **more})
                if status != 200:
                    raise RagkvError(f"A question was not answered: {told}")
                known.append(Known(index=index, asked={**asked, **more}, text=told["answer"]))
    return known


def _mixed_rows(outcome: Outcome, minutes: float, say: Callable[[str], None]) -> list[Row]:
    for line in [*outcome.errors[:5], *outcome.different[:5]]:
        say(f"error: {line}")
    say(", ".join(f"{number:,} {name}" for name, number in sorted(outcome.done.items())))
    third = max(1, len(outcome.memory) // 3)
    first, last = (statistics.median(part) / 1e6 for part in (outcome.memory[:third], outcome.memory[-third:]))
    name = f"{minutes:g} minutes mixed"
    return [
        _row(f"{name}: memory, last third", last, "MB", "first third", first, first / last if last else 1.0),
        _count_row(f"{name}: errors", len(outcome.errors), outcome.requests),
        _count_row(f"{name}: answers unlike those alone", len(outcome.different), outcome.requests),
    ]


def _tell(say: Callable[[str], None], at: float, found: Outcome) -> None:
    if round(at) % 30 == 0 and at > 1:
        last = found.memory[-1] / 1e6
        say(f"{at:.0f} s: {found.requests:,} requests, {len(found.errors)} errors, {last:.0f} MB")


def _row(name: str, value: float, unit: str, baseline: str, baseline_value: float, ratio: float) -> Row:
    return Row(
        name=name,
        value=round(value, 3),
        unit=unit,
        baseline=baseline,
        baseline_value=round(baseline_value, 3),
        ratio=round(ratio, 2),
    )


def _count_row(name: str, bad: int, of: int) -> Row:
    """How many of all; the ratio is the share that was good."""
    return _row(name, bad, "", "requests", of, (of - bad) / of if of else 1.0)


def _percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _numbers(pid: int) -> Iterator[tuple[str, int]]:
    """The lines of /proc/PID/status that count kilobytes."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        if line.endswith(" kB"):
            name, number, _ = line.split()
            yield name, int(number)
