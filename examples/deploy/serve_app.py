"""`ragkv serve` on Ray Serve: `RAGKV_PACK=index.ragkv serve run examples.deploy.serve_app:app` (docs/tiers.md).

Two deployments. The front is cheap and there may be many: it only searches, and asks a replica of the other by the
chunks that it found. An answer replica has the model and the whole HTTP app of `ragkv serve`. Which one gets a question
is decided by rendezvous hashing over the chunks, so that their KV is in its memory; when it is busy, any other gets it.
A replica that dies loses nothing: what it had not begun to answer is asked again elsewhere.

RAGKV_PACK names a file of `ragkv pack`, which every replica unpacks (RAGKV_TRUST: the public key that must have signed
it), or RAGKV_INDEX a folder. RAGKV_TIER is the URL of the tier where their KV is. RAGKV_REPLICAS: "2" answer replicas,
or "1-8" by load; RAGKV_GPUS: how many accelerators one has. Keys are checked by a proxy in front, as TLS is.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path

from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import FIFOMixin, RequestRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ragkv import RagKV
from ragkv.config import TierConfig
from ragkv.errors import RagkvError
from ragkv.index.create import change_settings
from ragkv.index.pack import unpack

NAME = os.environ.get("RAGKV_NAME", "index")
TRIES = 5


def open_snapshot(*, readonly: bool) -> RagKV:
    """This replica's own copy of the pack, or the folder, which is then only read."""
    if not (pack := os.environ.get("RAGKV_PACK")):
        return RagKV.open(os.environ["RAGKV_INDEX"], readonly=True)
    folder = Path(tempfile.mkdtemp(prefix="ragkv-replica-")) / NAME
    trust = os.environ.get("RAGKV_TRUST")
    unpack(Path(pack), folder, trust=None if trust is None else Path(trust))
    if url := os.environ.get("RAGKV_TIER"):
        change_settings(folder, {"tiers": (TierConfig(url=url),)})
    return RagKV.open(folder, readonly=readonly)


def owner(keys: list[tuple[str, int]], replicas: list[str]) -> str:
    """The replica that most of these chunks (key, tokens) belong to; a lost replica moves only its own."""
    tokens: Counter[str] = Counter()
    for key, weight in keys:
        tokens[max(replicas, key=lambda one: hashlib.blake2b(f"{key} {one}".encode()).digest())] += weight
    return max(sorted(tokens), key=lambda one: tokens[one]) if tokens else min(replicas)


class ChunkRouter(FIFOMixin, RequestRouter):
    """Prefers the replica that has the question's chunks; `keys` is the first argument of the call."""

    async def choose_replicas(self, candidate_replicas, pending_request=None):
        keys = pending_request.args[0] if pending_request is not None and pending_request.args else []
        if not keys or len(candidate_replicas) < 2:
            return [candidate_replicas]
        first = owner(keys, [str(one.replica_id.unique_id) for one in candidate_replicas])
        best = [one for one in candidate_replicas if str(one.replica_id.unique_id) == first]
        return [best, [one for one in candidate_replicas if one not in best]]


@serve.deployment(request_router_config=RequestRouterConfig(request_router_class=ChunkRouter))
class Answer:
    """The model, and the HTTP app of `ragkv serve`."""

    def __init__(self) -> None:
        from ragkv.server.app import make_app
        from ragkv.server.jobs import JobManager
        from ragkv.server.metrics import ConcurrencyLimiter
        from ragkv.server.middleware import Guard
        from ragkv.server.schemas import ServedIndexes
        from ragkv.server.settings import ServerLimits

        rag = open_snapshot(readonly=False)
        _ = rag.model
        served, limiter = ServedIndexes({NAME: rag}), ConcurrencyLimiter(64)
        app = make_app(served, limiter, JobManager(served, limiter))
        app.state.ready = True
        self._app = Guard(app, keys=None, hosts=None, limits=ServerLimits())

    async def answer(self, keys, method: str, path: str, query: bytes, headers: list, body: bytes):
        """Run a request through the app; yields its status and headers, then its body piece by piece."""
        sent: asyncio.Queue = asyncio.Queue()
        scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": query}
        scope |= {"headers": headers, "scheme": "http", "server": ("ragkv", 80), "client": ("127.0.0.1", 0)}
        scope |= {"http_version": "1.1", "root_path": "", "asgi": {"version": "3.0"}}
        received = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive():
            with suppress(StopIteration):
                return next(received)
            return await asyncio.Event().wait()  # until the task is cancelled

        task = asyncio.create_task(self._app(scope, receive, sent.put))
        task.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            while (message := await sent.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], [(key, value) for key, value in message.get("headers", [])]
                elif message.get("body"):
                    yield message["body"]
        finally:
            task.cancel()


@serve.deployment(max_ongoing_requests=256)
class Front:
    """Searches without a generation model, and passes the request on."""

    def __init__(self, answers) -> None:
        self._rag = open_snapshot(readonly=True)
        self._answers = answers.options(stream=True)

    def _keys(self, body: bytes) -> list[tuple[str, int]]:
        """The chunks that the question in a request finds; none if it is not a question."""
        with suppress(RagkvError, ValueError, LookupError, TypeError):
            asked = json.loads(body)
            question = asked["messages"][-1]["content"] if "messages" in asked else asked["question"]
            return [(one.chunk.chunk_id, len(one.chunk.token_ids)) for one in self._rag.retrieve(question)]
        return []

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        keys = await asyncio.to_thread(self._keys, body) if request.method == "POST" else []
        rest = (request.method, request.url.path, request.url.query.encode(), request.headers.raw, body)
        for left in reversed(range(TRIES)):
            stream = self._answers.answer.remote(keys, *rest)
            try:
                status, headers = await anext(stream)
                break
            except RayError:  # the replica is gone, and had not begun
                if not left:
                    return Response(status_code=503)
        answer = StreamingResponse(stream, status)
        answer.raw_headers = list(headers)
        return answer


low, _, high = os.environ.get("RAGKV_REPLICAS", "1").partition("-")
scale = {"autoscaling_config": {"min_replicas": int(low), "max_replicas": int(high)}} if high else {}
answers = Answer.options(
    ray_actor_options={"num_gpus": float(os.environ.get("RAGKV_GPUS", "0")), "num_cpus": 0.5},
    max_ongoing_requests=64,
    **(scale or {"num_replicas": int(low)}),
)
app = Front.options(ray_actor_options={"num_cpus": 0.1}).bind(answers.bind())
