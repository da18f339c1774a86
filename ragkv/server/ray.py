"""`ragkv serve --ray`: the server on the machines of a Ray cluster, over sealed snapshots of indexes (docs/tiers.md).

Two deployments of Ray Serve. The front checks requests as any server of ragkv does, and searches; there may be many,
because they load no generation model. An answer replica has the model and the app of `ragkv serve`. Rendezvous hashing
over the chunks that the front found decides which replica gets a question, so that their KV is in its memory; if that
one is busy, any other gets it. If a replica is lost, only its own share moves.

A snapshot is a pack, in a file or an object that all nodes reach. Every replica opens the pack whose digest was taken
when the command began, so all answer alike; on a node it is unpacked once, and deleted when its last user has ended.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import signal
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragkv.config import CONFIG_FILE, TierConfig, load_config, save_config
from ragkv.errors import RagkvError, UsageError, extra
from ragkv.index.pack import sealed, unpack
from ragkv.pipeline import RagKV
from ragkv.server.app import make_app
from ragkv.server.errors import ApiError, Json, event, too_many
from ragkv.server.jobs import JobManager
from ragkv.server.metrics import ConcurrencyLimiter
from ragkv.server.middleware import Guard, guard_app
from ragkv.server.schemas import OWNER, ServedIndexes
from ragkv.server.settings import Keys, ServerLimits, ServerSettings, reserve
from ragkv.util.files import locked, make_folder, user_folder
from ragkv.util.plugins import join_ray
from ragkv.util.telemetry import export_spans, request_id

TRIES = 5
"""How many replicas are tried for a request, if each is lost."""
READY_SECONDS = 5.0
"""How long `/readyz` waits for a replica."""
_SNAPSHOT = "is a snapshot, which is read-only: change the index that it was packed from, and serve a new pack"
_SCOPE = ("method", "path", "raw_path", "query_string", "headers", "scheme", "http_version", "root_path")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """The indexes to serve, and the number of processes; also the `args` of a Serve config
    (examples/deploy/kubernetes.yaml).

    `packs`: files or URLs by the names of the indexes. `replicas` and `fronts`: a number, or "1-8" by load. `gpus` and
    `cpus` of a replica; by default a GPU if the cluster has any. `tiers`: a `ragkv.toml` with their `[[tiers]]`.
    """

    packs: Mapping[str, str]
    replicas: str = "1"
    fronts: str = "1"
    gpus: float | None = None
    cpus: float = 0.5
    tiers: str | None = None
    host: str = "0.0.0.0"
    keys: str | None = None
    origins: Sequence[str] = ()
    requests: int = 64
    stop_seconds: int = 20
    footer: bool = False
    device: str | None = None
    batch_tokens: int | None = None
    max_sequences: int | None = None
    digests: Mapping[str, str] = field(default_factory=dict)
    """The digests of the packs (`pinned`)."""
    shared: tuple[TierConfig, ...] = ()
    """The tiers (`pinned`)."""

    def pinned(self) -> RayOptions:
        """The options with the packs' digests and the tiers as they are now, so that replicas read neither later."""
        place = None if self.tiers is None else Path(self.tiers)
        shared = () if place is None else load_config(place if place.is_dir() else place.parent).tiers
        return replace(self, digests={name: sealed(pack) for name, pack in self.packs.items()}, shared=shared)


@contextmanager
def snapshot(pack: str, digest: str, tiers: tuple[TierConfig, ...] = ()) -> Iterator[Path]:
    """The folder of the unpacked pack, which all processes of this user and node share; the last one deletes it.

    A lock on its `ragkv.toml` marks it as in use. Remains of killed processes are deleted by the next process.
    UsageError for a pack with another digest.
    """
    base = user_folder("XDG_CACHE_HOME", ".cache") / "ragkv" / "packs"
    make_folder(base)
    folder = base / f"{digest[:32]}-{hashlib.blake2b(repr(tiers).encode(), digest_size=4).hexdigest()}"
    with locked(base):
        for other in base.iterdir():
            if other != folder and other.is_dir():
                _delete_unused(other)
        if not folder.exists():
            fresh = base / f".{folder.name}"
            try:
                unpack(pack, fresh, digest=digest)
                save_config(fresh, replace(load_config(fresh), tiers=tiers))
                with RagKV.open(fresh) as rag, suppress(RagkvError):  # without documents there is nothing to search
                    rag.retrieve("?", rerank=False)  # builds the retrieval indexes, which readers use
                fresh.rename(folder)
            finally:
                shutil.rmtree(fresh, ignore_errors=True)
        used = (folder / CONFIG_FILE).open("rb")
        fcntl.flock(used, fcntl.LOCK_SH)
    try:
        yield folder
    finally:
        with locked(base):
            used.close()
            _delete_unused(folder)


def _delete_unused(folder: Path) -> None:
    """Delete a snapshot that no process uses; call it while the cache is locked."""
    try:
        with (folder / CONFIG_FILE).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    except FileNotFoundError:
        logger.info("%s was not unpacked to its end", folder)
    shutil.rmtree(folder, ignore_errors=True)


def _opened(options: RayOptions, held: ExitStack) -> dict[str, RagKV]:
    """The indexes of the packs, read-only, until `held` is closed."""
    indexes = {}
    for name, pack in options.packs.items():
        folder = held.enter_context(snapshot(pack, options.digests[name], options.shared))
        rag = RagKV.open(
            folder,
            device=options.device,
            readonly=True,
            batch_tokens=options.batch_tokens,
            max_sequences=options.max_sequences,
        )
        indexes[name] = held.enter_context(rag)
    return indexes


def preferred(chunks: Sequence[tuple[str, int]], replicas: Sequence[str]) -> str:
    """The replica with the most tokens of these chunks (id, tokens), by rendezvous hashing (Thaler and Ravishankar,
    1998): a chunk belongs to the replica with the largest hash, so a lost replica moves only its own chunks.
    """
    tokens: Counter[str] = Counter()
    for chunk, count in chunks:
        tokens[max(replicas, key=lambda one: hashlib.blake2b(f"{chunk} {one}".encode()).digest())] += count
    return max(sorted(tokens), key=lambda one: tokens[one])


class AnswerReplica:
    """A replica: the indexes with their models, and the app of `ragkv serve`."""

    def __init__(self, options: RayOptions) -> None:
        self._held = ExitStack()
        with ExitStack() as held:
            held.callback(export_spans())
            served = ServedIndexes(_opened(options, held))
            for _, rag in served:
                rag.index.require_same_model()
                rag.model  # noqa: B018 - loaded now, so that the first question need not wait
            self._limiter = ConcurrencyLimiter(options.requests)
            manager = JobManager(served, self._limiter, refusal=_SNAPSHOT)
            app = make_app(served, self._limiter, manager, footer=options.footer)
            app.state.ready = True
            held.callback(manager.close)
            held.callback(self._limiter.close)
            self._held = held.pop_all()
        self._app = Guard(app, keys=None, hosts=None, limits=ServerLimits(), responded=self._limiter.responded)

    def __del__(self) -> None:
        """Called by Ray Serve when the replica ends."""
        self._held.close()

    def metrics(self) -> tuple[str, str]:
        """The process, and its metrics in Prometheus' format."""
        return f"{os.uname().nodename}:{os.getpid()}", self._limiter.text().decode()

    async def answer(
        self, chunks: Sequence[tuple[str, int]], scope: Scope, body: bytes
    ) -> AsyncGenerator[tuple[int, list[tuple[bytes, bytes]]] | bytes]:
        """Run a request through the app; yields its status and headers, then its body piece by piece.

        `chunks` are for the router.
        """
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        received = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Message:
            for message in received:
                return message
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return] # until it is cancelled

        task = asyncio.create_task(self._app({"type": "http", "asgi": {"version": "3.0"}, **scope}, receive, sent.put))
        task.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            while (message := await sent.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], [(name, value) for name, value in message["headers"]]
                elif message.get("body"):
                    yield message["body"]
        finally:
            task.cancel()


class Front:
    """Checks requests, searches, and forwards requests to the replicas behind the handle `answers`."""

    def __init__(self, options: RayOptions, keys: Keys | None, answers: Any) -> None:
        self._held = ExitStack()
        with ExitStack() as held:
            held.callback(export_spans())
            self._indexes = _opened(options, held)
            self._held = held.pop_all()
        self._answers = answers
        self._ask = answers.options(stream=True).answer.remote
        routes = [Route("/healthz", self._healthz), Route("/metrics", self._metrics)]
        router = Router(routes, default=self._relay, redirect_slashes=False)
        most = 4 * options.requests + 64
        self._app = guard_app(router, keys=keys, limits=ServerLimits(), origins=options.origins, most=most)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The app; called by Ray Serve."""
        return self._app

    def __del__(self) -> None:
        """Called by Ray Serve when the front ends."""
        self._held.close()

    async def _healthz(self, _: Request) -> Json:
        return Json({"status": "ok"})

    async def _metrics(self, _: Request) -> PlainTextResponse:
        """The metrics of all replicas, with the label `replica`."""
        texts = dict(await self._answers.broadcast("metrics").results_async(timeout_s=READY_SECONDS))
        return PlainTextResponse(merged_metrics(texts), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _chunks(self, path: str, body: bytes) -> list[tuple[str, int]]:
        """The chunks (id, tokens) that the question of a request finds; none if it is not a question."""
        with suppress(RagkvError, ValueError, LookupError, TypeError, AttributeError):
            asked = json.loads(body)
            name = path.split("/")[3] if path.startswith("/api/indexes/") else asked["model"]
            rag = self._indexes[name.removeprefix(f"{OWNER}/").partition(":")[0]]
            question = asked["messages"][-1]["content"] if "messages" in asked else asked["question"]
            if not isinstance(question, str):
                question = " ".join(part["text"] for part in question)
            found = rag.retrieve(question, top_k=asked.get("top_k"), where=asked.get("where") or ())
            return [(one.chunk.chunk_id, len(one.chunk.token_ids)) for one in found]
        return []

    async def _relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        form = request.headers.get("content-type", "").startswith("multipart/")
        body = b"" if form else await request.body()  # an upload is refused in any case
        chunks = await asyncio.to_thread(self._chunks, scope["path"], body) if scope["method"] == "POST" else []
        asked = {name: scope[name] for name in _SCOPE if name in scope}
        known = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
        asked["headers"] = [*known, (b"x-request-id", request_id.get().encode())]  # the same in both logs
        try:
            async with asyncio.timeout(READY_SECONDS if scope["path"] == "/readyz" else None):
                await self._retry(chunks, asked, body, send)
        except TimeoutError as error:
            raise _unavailable("No replica is ready yet.") from error

    async def _retry(self, chunks: Sequence[tuple[str, int]], scope: Scope, body: bytes, send: Send) -> None:
        """Ask one replica after another, until one has begun to answer: a response that is not streamed is complete
        before anything is sent. A stream that is lost later ends with an error event.
        """
        from ray.exceptions import RayError, RayTaskError
        from ray.serve.exceptions import BackPressureError, RayServeException

        sent = False
        for left in reversed(range(TRIES)):
            stream = self._ask(chunks, scope, body)
            try:
                status, headers = await anext(stream)
                headers = [(name, value) for name, value in headers if name != b"x-request-id"]
                streamed = any(name == b"content-type" and b"event-stream" in value for name, value in headers)
                piece = await anext(stream, b"") if streamed else b"".join([piece async for piece in stream])
                sent = True
                await send({"type": "http.response.start", "status": status, "headers": headers})
                await send({"type": "http.response.body", "body": piece, "more_body": streamed})
                if streamed:
                    async for piece in stream:
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                    await send({"type": "http.response.body", "body": b""})
                return
            except BackPressureError as error:
                message = "All replicas answer as many requests as they may: try again in a second."
                raise too_many(message, seconds=1) from error
            except (RayError, RayServeException) as error:
                if isinstance(error, RayTaskError) and not sent:  # the request failed; the replica is not lost
                    raise
                logger.warning("a replica was lost (%s)", error)
                if sent:
                    break
                if not left:
                    raise _unavailable("No replica could answer: try again in a second.") from error
            finally:
                stream.cancel()
        lost = _unavailable("The replica that gave this answer was lost: ask again.").body
        ending = event(lost, "error") if scope["path"].startswith("/api/") else event(lost) + b"data: [DONE]\n\n"
        await send({"type": "http.response.body", "body": ending})


def _unavailable(message: str) -> ApiError:
    return ApiError(503, message, kind="server_error", code="unavailable", headers={"retry-after": "1"})


def merged_metrics(texts: Mapping[str, str]) -> bytes:
    """Prometheus' text of several processes as one, with the process as the label `replica`."""
    families: dict[str, Metric] = {}
    for replica, text in texts.items():
        for family in text_string_to_metric_families(text):
            samples = [one._replace(labels={**one.labels, "replica": replica}) for one in family.samples]
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type)).samples += samples

    class Found:
        def collect(self) -> Iterator[Metric]:
            yield from families.values()

    return generate_latest(Found())


def replica_counts(name: str, count: str) -> dict[str, Any]:
    """The setting of a deployment for "2" or "1-8" replicas."""
    low, _, high = str(count).partition("-")
    if not (low.isdecimal() and (high or low).isdecimal() and 0 < int(low) <= int(high or low)):
        raise UsageError(f"{name} is a number, or two of them as in 1-8, unlike {count!r}.")
    if not high:
        return {"num_replicas": int(low)}
    return {
        "autoscaling_config": {"min_replicas": int(low), "max_replicas": int(high), "target_ongoing_requests": 8},
    }


@cache
def _chunk_router() -> type:
    from ray.serve.request_router import RequestRouter

    class ChunkRouter(RequestRouter):  # type: ignore[misc]
        """Gives a request to the replica that its chunks belong to, or to any other while that one is busy."""

        async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
            chunks = pending_request.args[0] if pending_request is not None and pending_request.args else []
            if not chunks or len(candidate_replicas) < 2:
                return [candidate_replicas]
            names = {one.replica_id.unique_id: one for one in candidate_replicas}
            best = names.pop(preferred(chunks, list(names)))
            return [[best], list(names.values())]

    return ChunkRouter


def __getattr__(name: str) -> Any:
    """`ChunkRouter`, which Ray Serve imports by name; everything else here works without Ray."""
    if name == "ChunkRouter":
        return _chunk_router()
    raise AttributeError(name)


def application(args: Mapping[str, Any]) -> Any:
    """The Serve application of `RayOptions`, by the names of its fields; also its `import_path` in a Serve config."""
    import ray
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    if unknown := args.keys() - {each.name for each in fields(RayOptions)}:
        raise UsageError(f"There is no argument {min(unknown)!r} of ragkv's application on Ray Serve.")
    options = RayOptions(**args)
    keys = None if options.keys is None else Keys.read(Path(options.keys))
    ServerSettings(host=options.host, keys=keys)  # keys are required unless this machine alone may ask
    options = options if options.digests else options.pinned()
    gpus = min(1.0, ray.cluster_resources().get("GPU", 0)) if options.gpus is None else options.gpus
    answers = serve.deployment(AnswerReplica).options(
        ray_actor_options={"num_gpus": gpus, "num_cpus": options.cpus},
        request_router_config=RequestRouterConfig(request_router_class=f"{__name__}:ChunkRouter"),
        max_ongoing_requests=options.requests,
        max_queued_requests=options.requests,
        graceful_shutdown_timeout_s=options.stop_seconds,
        **replica_counts("--replicas", options.replicas),
    )
    front = serve.deployment(serve.ingress()(Front)).options(
        ray_actor_options={"num_cpus": 0.1},
        max_ongoing_requests=4 * options.requests,
        graceful_shutdown_timeout_s=options.stop_seconds,
        **replica_counts("fronts", options.fronts),
    )
    return front.bind(options, keys, answers.bind(options))


def run_on_ray(address: str, options: RayOptions, *, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve on the Ray cluster at `address` ("local" starts it on this machine) until SIGINT, SIGTERM or SIGHUP.

    `on_ready` receives the address once questions are answered. MissingExtraError without Ray; UsageError if a pack,
    the cluster or a free port is missing; RagkvError with the reason if the replicas do not start.
    """
    with extra("--ray needs Ray", "ray", "serve"):
        import ray
        from ray import serve
    options = options.pinned()
    with reserve(options.host, port) as free:
        port = free.getsockname()[1]
    own = {"include_dashboard": False} if address == "local" else {}
    join_ray(address, logging_level=logging.ERROR, **own)
    try:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        app = application({each.name: getattr(options, each.name) for each in fields(options)})
        have, least = ray.cluster_resources(), int(options.replicas.partition("-")[0])
        if have.get("CPU", 0) < least * options.cpus or 0 < have.get("GPU", 0) < least:
            logger.warning("the cluster has no room for %d replicas: waiting until it has grown", least)
        serve.start(http_options={"host": options.host, "port": port})
        try:
            serve.run(app, name=OWNER, route_prefix="/")
        except RuntimeError as error:
            raise RagkvError(f"The replicas did not start: {_reason(serve.status(), error)}") from error
        stopped = threading.Event()  # until here, an interrupt ends the command as any other
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: stopped.set())
        on_ready(f"http://{f'[{options.host}]' if ':' in options.host else options.host}:{port}")
        stopped.wait()
        serve.delete(OWNER)
    finally:
        ray.shutdown()


def _reason(status: Any, error: Exception) -> str:
    """Why replicas did not start: the error in Ray Serve's status of the deployments."""
    found = [] if OWNER not in status.applications else status.applications[OWNER].deployments.values()
    lines = [
        line for one in found for line in one.message.splitlines() if re.match(r"(\w+\.)*\w+(Error|Exception): ", line)
    ]
    return lines[-1].partition(": ")[2] if lines else str(error).strip().splitlines()[-1]
