"""How many requests are under way, and what the server measures of them."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ragkv.server.failure import Refusal
from ragkv.types import Answer

__all__ = ["Crowd", "Visit"]

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Crowd:
    """Lets at most `most` requests in at a time: more would wait long, and are told to come again.

    The metrics have vLLM's names, with `ragkv` instead of `vllm`, so that its dashboards need one word changed.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self.inside = 0
        """Requests that are under way."""
        self._visits: set[Visit] = set()
        self._stopped = False
        self.registry = CollectorRegistry()
        labels = ["model_name"]
        self._running = self._gauge("num_requests_running", "Answers that are being generated.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that have no token yet.")
        self._first = self._histogram("time_to_first_token_seconds", "From the request to its first token.")
        self._whole = self._histogram("e2e_request_latency_seconds", "From the request to its last token.")
        self._prompt = Counter("ragkv:prompt_tokens", "Tokens of prompts.", labels, registry=self.registry)
        self._made = Counter("ragkv:generation_tokens", "Tokens generated.", labels, registry=self.registry)
        self._done = Counter(
            "ragkv:request_success", "Finished answers.", [*labels, "finished_reason"], registry=self.registry
        )
        self._looked = Counter("ragkv:prefix_cache_queries", "Chunks needed.", labels, registry=self.registry)
        self._stored = Counter("ragkv:prefix_cache_hits", "Chunks whose KV was stored.", labels, registry=self.registry)
        self._jobs = Counter(
            "ragkv:ingest_jobs", "Ingest jobs that have ended.", [*labels, "state"], registry=self.registry
        )

    def job_ended(self, name: str, state: str) -> None:
        """Count an ingest job of the index `name`: done, failed, cancelled or interrupted."""
        self._jobs.labels(name, state).inc()

    def enter(self, name: str) -> Visit:
        """Let a request to the index `name` in; Refusal 429 when there are too many, 503 when none is let in again."""
        if self._stopped:
            raise Refusal(503, "The server is stopping.", kind="server_error", code="unavailable")
        if self.inside >= self._most:
            message = f"{self.inside} requests are being answered, the most at a time: try again in a second."
            raise Refusal(
                429, message, kind="rate_limit_error", code="rate_limit_exceeded", headers={"retry-after": "1"}
            )
        self.inside += 1
        visit = Visit(self, name, self._clock())
        self._visits.add(visit)
        return visit

    def stop(self) -> None:
        """End all answers at their next token, and let nobody in any more."""
        self._stopped = True
        for visit in self._visits:
            visit.cancel()

    def text(self) -> bytes:
        """All metrics in Prometheus' format."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, says: str) -> Gauge:
        return Gauge(f"ragkv:{name}", says, ["model_name"], registry=self.registry)

    def _histogram(self, name: str, says: str) -> Histogram:
        return Histogram(f"ragkv:{name}", says, ["model_name"], buckets=_SECONDS, registry=self.registry)


class Visit:
    """One request, from when it was let in until it `leave`s."""

    def __init__(self, crowd: Crowd, name: str, start: float) -> None:
        self._crowd = crowd
        self._name = name
        self._start = start
        self._began = self._left = False
        self.cancel: Callable[[], object] = lambda: None
        """Ends its answer early; set by who answers."""
        crowd._waiting.labels(name).inc()

    def began(self) -> None:
        """Its first token is there."""
        if not self._began:
            self._began = True
            self._crowd._waiting.labels(self._name).dec()
            self._crowd._running.labels(self._name).inc()
            self._crowd._first.labels(self._name).observe(self._crowd._clock() - self._start)

    def finished(self, answer: Answer, prompt: int, generated: int) -> None:
        """Its answer is complete."""
        crowd, name = self._crowd, self._name
        crowd._whole.labels(name).observe(crowd._clock() - self._start)
        crowd._prompt.labels(name).inc(prompt)
        crowd._made.labels(name).inc(generated)
        crowd._done.labels(name, answer.finish_reason).inc()
        crowd._looked.labels(name).inc(answer.kv.hits + answer.kv.misses)
        crowd._stored.labels(name).inc(answer.kv.hits)

    def leave(self) -> None:
        """It is over, one way or the other; nothing happens the second time."""
        if not self._left:
            self._left = True
            self._crowd.inside -= 1
            self._crowd._visits.discard(self)
            (self._crowd._running if self._began else self._crowd._waiting).labels(self._name).dec()
