"""The limit on concurrent requests, and the server's Prometheus metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ragkv.server.errors import ApiError, stopping_error, too_many
from ragkv.types import Answer

if TYPE_CHECKING:
    from ragkv.pipeline import RagKV

M = TypeVar("M")
QUEUE = 16
"""The number of requests that may wait for a place."""
PATIENCE_SECONDS = 1.0
"""How long a request waits for a place."""
_ASK_THREADS = 8
_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class ConcurrencyLimiter:
    """Admits at most `most` requests at a time. A few more wait up to `patience` seconds for a place; the rest get 429.

    The metrics have vLLM's names, with `ragkv` instead of `vllm`, so that its dashboards need one word changed.
    """

    def __init__(self, most: int, *, patience: float = PATIENCE_SECONDS) -> None:
        self._most = most
        self._patience = patience
        self._places = asyncio.Semaphore(most)
        self._queued = 0
        # not the loop's default executor, where uploads and listings would delay every question
        self.asks = ThreadPoolExecutor(_ASK_THREADS, "ragkv-asks")
        """Threads for the work of a question before it starts running in its own thread."""
        self.vectors = ThreadPoolExecutor(1, "ragkv-vectors")
        """The thread in which all embedding and reranking requests take turns."""
        self._trackers: set[RequestTracker] = set()
        self._stopped = False
        self.registry = CollectorRegistry()
        metric = self._metric
        self._running = metric(Gauge, "num_requests_running", "Answers that are being generated.")
        self._waiting = metric(Gauge, "num_requests_waiting", "Requests that have no token yet.")
        first, last = "From the request to its first token.", "From the request to its last token."
        self._first = metric(Histogram, "time_to_first_token_seconds", first, buckets=_SECONDS)
        self._whole = metric(Histogram, "e2e_request_latency_seconds", last, buckets=_SECONDS)
        self._prompt = metric(Counter, "prompt_tokens", "Tokens of prompts.")
        self._made = metric(Counter, "generation_tokens", "Tokens generated.")
        self._done = metric(Counter, "request_success", "Finished answers.", "finished_reason")
        self._looked = metric(Counter, "prefix_cache_queries", "Chunks needed.")
        self._stored = metric(Counter, "prefix_cache_hits", "Chunks whose KV was stored.")
        self._responses = Counter(
            "ragkv:http_requests",
            "HTTP requests by the status of their response; 499: the client went away.",
            ["method", "handler", "status"],
            registry=self.registry,
        )
        self._jobs = metric(Counter, "ingest_jobs", "Ingest jobs that have ended.", "state")

    def job_ended(self, name: str, state: str) -> None:
        """Count an ingest job of the index `name`: done, failed, cancelled or interrupted."""
        self._jobs.labels(name, state).inc()

    def responded(self, method: str, handler: str | None, status: int) -> None:
        """Count a response; `handler` is its route's path."""
        self._responses.labels(method if method in _METHODS else "other", handler or "none", status or 499).inc()

    @property
    def inside(self) -> int:
        """The number of admitted requests."""
        return len(self._trackers)

    async def admit(self, name: str) -> RequestTracker:
        """Admit a request to the index `name`, after waiting briefly for a place if necessary; ApiError 429 if there
        are too many, 503 if the server is stopping.
        """
        if self._stopped:
            raise stopping_error()
        if self._places.locked() and self._queued >= QUEUE:
            raise self._full()
        self._queued += 1
        waiting = self._waiting.labels(name)
        waiting.inc()
        try:
            async with asyncio.timeout(self._patience):
                await self._places.acquire()
        except TimeoutError:
            raise self._full() from None
        finally:
            self._queued -= 1
            waiting.dec()
        if self._stopped:
            raise stopping_error()
        tracker = RequestTracker(self, name, time.monotonic())
        self._trackers.add(tracker)
        return tracker

    def _full(self) -> ApiError:
        message = f"{self.inside} requests are being answered, the most at a time: try again in a second."
        return too_many(message, seconds=1)

    def stop(self) -> None:
        """Cancel all running and waiting requests, and admit no more."""
        self._stopped = True
        for _ in range(self._most + QUEUE):  # whoever waits, now or later, is refused
            self._places.release()
        for tracker in list(self._trackers):
            tracker.cancel()

    def close(self) -> None:
        """`stop`, and wait for the threads."""
        self.stop()
        for threads in (self.asks, self.vectors):
            threads.shutdown(cancel_futures=True)

    def text(self) -> bytes:
        """All metrics in Prometheus' format."""
        return generate_latest(self.registry)

    def _metric(self, kind: Callable[..., M], name: str, says: str, *labels: str, **more: Any) -> M:
        return kind(f"ragkv:{name}", says, ["model_name", *labels], registry=self.registry, **more)


class IndexMetrics:
    """A collector of the indexes' own counters: uses of shared tiers, and dropped proposals of Qdrant."""

    def __init__(self, served: Iterable[tuple[str, RagKV]]) -> None:
        self._served = served

    def collect(self) -> Iterator[Metric]:
        uses = [(name, tier) for name, rag in self._served if (tiers := rag.index.tiers) for tier in tiers.uses()]
        for fact in [] if not uses else uses[0][1].keys() - {"url"}:
            family = GaugeMetricFamily if fact == "open" else CounterMetricFamily
            metric = family(
                f"ragkv:tier_{fact}", f"{fact.replace('_', ' ')} of a shared tier", labels=["model_name", "tier"]
            )
            for name, tier in uses:
                metric.add_metric([name, tier["url"]], float(tier[fact]))
            yield metric
        says = "chunks that Qdrant proposed and the index does not hold"
        dropped = CounterMetricFamily("ragkv:qdrant_dropped", says, labels=["model_name"])
        for name, rag in self._served:
            if rag.config.qdrant.url:
                dropped.add_metric([name], float(rag.index.dropped_proposals))
        yield dropped


class RequestTracker:
    """Records one request's metrics, from its admission until `leave`."""

    def __init__(self, limiter: ConcurrencyLimiter, name: str, start: float) -> None:
        self._limiter = limiter
        self._name = name
        self._start = start
        self._began = self._left = False
        self.cancel: Callable[[], object] = lambda: None
        """Ends the answer early; set by `AnswerResponse`."""
        limiter._waiting.labels(name).inc()

    def runs(self) -> None:
        """Count the request as running instead of waiting."""
        if not self._began:
            self._began = True
            self._limiter._waiting.labels(self._name).dec()
            self._limiter._running.labels(self._name).inc()

    def began(self) -> None:
        """Record the time to the first token."""
        if not self._began:
            self.runs()
            self._limiter._first.labels(self._name).observe(time.monotonic() - self._start)

    def finished(self, answer: Answer, prompt: int, generated: int) -> None:
        """Record a complete answer."""
        limiter, name = self._limiter, self._name
        limiter._whole.labels(name).observe(time.monotonic() - self._start)
        limiter._prompt.labels(name).inc(prompt)
        limiter._made.labels(name).inc(generated)
        limiter._done.labels(name, answer.finish_reason).inc()
        limiter._looked.labels(name).inc(answer.kv.hits + answer.kv.misses)
        limiter._stored.labels(name).inc(answer.kv.hits)

    def abandoned(self) -> None:
        """Record that the client disconnected before the end."""
        if not self._left:
            self._limiter._done.labels(self._name, "abort").inc()

    def leave(self) -> None:
        """Give up the request's place. Further calls do nothing."""
        if not self._left:
            self._left = True
            self._limiter._places.release()
            self._limiter._trackers.discard(self)
            (self._limiter._running if self._began else self._limiter._waiting).labels(self._name).dec()
