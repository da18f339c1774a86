"""`ragkv serve --ray`: its parts without Ray's processes, lost replicas, and one test of everything on Ray."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import warnings
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

import ragkv.server.ray as on_ray
from ragkv import RagKV
from ragkv.errors import MissingExtraError, UsageError
from ragkv.index.pack import sealed
from ragkv.server.ray import AnswerReplica, Front, RayOptions, preferred, run_on_ray, snapshot

ASKED = {"question": "Who founded Bolt Ltd?", "engine": "block", "max_new_tokens": 4}
CHAT = {"model": "ragkv/two:block", "messages": [{"role": "user", "content": ASKED["question"]}], "max_tokens": 4}
NAMED = {"x-request-id": "request-17"}  # shown in errors


@pytest.fixture(scope="module")
def pack(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("packs") / "two.ragkv"
    with RagKV.open(folder, device="cpu") as rag:
        rag.pack(path)
    return str(path)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def options(pack):
    return RayOptions(packs={"two": pack}, device="cpu", host="127.0.0.1").pinned()


@pytest.fixture(scope="module")
def replica(options):
    made = AnswerReplica(options)
    yield made
    made.__del__()


class Handle:
    """A Ray Serve handle to one replica; its first `losses` calls are lost after a number of body chunks."""

    def __init__(self, replica, losses=()):
        self.replica, self.losses, self.calls, self.answer, self.remote = replica, list(losses), [], self, self._call

    def options(self, **_):
        return self

    def broadcast(self, name):
        class Result:
            async def results_async(_, timeout_s):  # noqa: N805
                return [getattr(self.replica, name)(), ("other", self.replica.metrics()[1])]

        return Result()

    def _call(self, chunks, scope, body):
        self.calls.append(chunks)
        return Stream(self.replica.answer(chunks, scope, body), self.losses.pop(0) if self.losses else None)


class Stream:
    def __init__(self, pieces, lost_after):
        self.pieces, self.left = pieces, lost_after

    def __aiter__(self):
        return self

    async def __anext__(self):
        from ray.exceptions import ActorDiedError

        if self.left == 0:
            raise ActorDiedError
        self.left = None if self.left is None else self.left - 1
        return await anext(self.pieces)

    def cancel(self):
        self.closing = asyncio.ensure_future(self.pieces.aclose())


@pytest.fixture
def ask(options, replica):
    """Ask a front whose replica is lost after a number of body chunks; returns the response and the handle."""
    with warnings.catch_warnings():  # from pydantic
        warnings.simplefilter("ignore")
        pytest.importorskip("ray.serve", reason="needs Ray: pip install -e '.[ray]'")
    with ExitStack() as fronts:

        def asked(method, path, *losses, **more):
            handle = Handle(replica, losses)
            front = Front(options, None, handle)
            fronts.callback(front.__del__)

            async def run():
                transport = httpx.ASGITransport(app=front.__serve_build_asgi_app__(), raise_app_exceptions=False)
                async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                    return await client.request(method, path, **more)

            return asyncio.run(run()), handle

        yield asked


def test_chunks_stay_with_their_replica_and_a_lost_one_moves_only_its_own():
    questions = [[(f"c{number}", 100)] for number in range(300)]
    before = [preferred(each, ["a", "b", "c"]) for each in questions]
    after = [preferred(each, ["c", "a"]) for each in questions]
    assert all(now == then for then, now in zip(before, after, strict=True) if then != "b")
    assert {then for then, now in zip(before, after, strict=True) if now == "c"} == {"b", "c"}
    assert min(map(before.count, "abc")) > 60
    parts = [("c1", 9), ("c2", 1)]
    assert preferred(parts, ["a", "b", "c"]) == before[1]


def test_a_node_unpacks_once_and_the_last_user_deletes(pack, folder, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pack = f"file://{pack}"  # as in object storage
    base, digest, calls = tmp_path / "ragkv" / "packs", sealed(pack), []
    unpack = on_ray.unpack
    monkeypatch.setattr(on_ray, "unpack", lambda *given, **more: calls.append(given) or unpack(*given, **more))
    (base / ".left by a killed one").mkdir(parents=True)
    with snapshot(pack, digest) as first:
        with snapshot(pack, digest) as second, RagKV.open(second, device="cpu", readonly=True) as rag:
            assert second == first
            assert (first / "derived" / "bm25").exists()
            assert rag.retrieve(ASKED["question"])
        assert first.exists()
    assert len(calls) == 1
    assert not list(base.iterdir())
    with pytest.raises(UsageError, match="replaced meanwhile"), snapshot(pack, "0" * 64):
        raise AssertionError("it is another one")
    assert not list(base.iterdir())


@pytest.mark.parametrize("losses", [(), (0,), (1, 0)])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_that_has_sent_nothing_is_asked_again(ask, rag, losses, streamed):
    response, handle = ask("POST", "/api/indexes/two/query", *losses, json={**ASKED, "stream": streamed})
    assert response.status_code == 200
    body = response.text.rpartition("event: done\ndata: ")[2] if streamed else response.text
    assert json.loads(body)["answer"] == rag.query(ASKED["question"], engine="block", max_new_tokens=4).text
    assert len(handle.calls) == len(losses) + 1
    found = [(one.chunk.chunk_id, len(one.chunk.token_ids)) for one in rag.retrieve(ASKED["question"])]
    assert handle.calls[0] == found
    assert len(response.headers.get_list("x-request-id")) == 1


@pytest.mark.parametrize(("path", "body"), [("/api/indexes/two/query", ASKED), ("/v1/chat/completions", CHAT)])
def test_a_stream_that_is_lost_ends_with_an_error(ask, path, body):
    response, handle = ask("POST", path, 4, json={**body, "stream": True})
    assert (response.status_code, len(handle.calls)) == (200, 1)
    events = [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line[6:7] == "{"]
    assert "was lost: ask again" in events[-1]["error"]["message"]
    assert ("event: error" in response.text) == path.startswith("/api")


def test_a_lost_cluster_is_an_error(ask):
    response, handle = ask("POST", "/v1/chat/completions", *[0] * 9, json=CHAT)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
    assert len(handle.calls) == on_ray.TRIES


def test_the_routes_are_those_of_a_server_and_a_snapshot_is_read_only(ask, call, rag):
    assert ask("GET", "/readyz")[0].json() == {"status": "ready", "unavailable": 0}
    for path in ("/v1/models", "/api/indexes/two/documents", "/healthz", "/nowhere", "/api/indexes/x/documents"):
        got, wanted = ask("GET", path, headers=NAMED)[0], call("GET", path, headers=NAMED)
        assert (got.status_code, got.headers["content-type"]) == (wanted.status_code, wanted.headers["content-type"])
        if path != "/v1/models":  # has the start time
            assert got.json() == wanted.json()
    files = {"files": ("a.txt", b"text" * (1 << 21))}
    name = rag.list_documents().documents[0].document.document_id
    for method, path, more in [
        ("POST", "/api/indexes/two/documents", {"files": files}),
        ("DELETE", f"/api/indexes/two/documents/{name.replace('/', '%2F')}", {}),
    ]:
        refused = ask(method, path, **more)[0]
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "read_only")
        assert "is a snapshot, which is read-only: change the index" in refused.json()["error"]["message"]
    metrics = ask("GET", "/metrics")[0].text
    assert metrics.count("# TYPE ragkv:generation_tokens_total counter") == 1
    assert 'replica="other"' in metrics
    assert ask("GET", "/v1/models", headers={"host": "evil.example"})[0].status_code == 403


def test_what_is_missing_or_wrong_is_named(pack, tmp_path, monkeypatch):
    options = RayOptions(packs={"two": str(tmp_path)}, host="127.0.0.1")
    with pytest.raises(UsageError, match="There is no pack at"):
        options.pinned()
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"pip install -e '\.\[ray,serve\]'"):
        run_on_ray("local", options, port=0, on_ready=print)
    for given, message in [("0", "--replicas is"), ("4-2", "--replicas is"), ("many", "--replicas is")]:
        with pytest.raises(UsageError, match=message):
            on_ray.replica_counts("--replicas", given)
    assert on_ray.replica_counts("--replicas", "2") == {"num_replicas": 2}
    assert on_ray.replica_counts("--replicas", "1-8")["autoscaling_config"]["max_replicas"] == 8


@pytest.mark.nightly
def test_on_ray_itself(pack, rag, tmp_path):
    """Two replicas, one of which is killed: answers equal the index's, and no process is left."""
    pytest.importorskip("ray", reason="needs Ray: pip install -e '.[ray]'")
    command = [sys.executable, "-c", "from ragkv.cli.main import main; main()", "serve", "--ray", "local", "--json"]
    command += ["--index", f"two={pack}", "--replicas", "2", "--port", "0", "--device", "cpu"]
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = json.loads(server.stdout.readline())["url"].removesuffix("/v1")
            wanted = rag.query(ASKED["question"], engine="block", max_new_tokens=4).text
            for killed in (False, True):
                if killed:
                    os.kill(replicas_of(server.pid)[0], signal.SIGKILL)
                for _ in range(5):
                    answer = httpx.post(f"{url}/api/indexes/two/query", json=ASKED, timeout=600)
                    assert answer.json()["answer"] == wanted
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(600) == 0
    assert not list((tmp_path / "ragkv" / "packs").iterdir())


def replicas_of(command):
    """The processes of a command's answer replicas: those whose raylet has its session's folder as an argument."""
    processes = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            processes[int(path.name)] = (parent, (path / "cmdline").read_text(errors="replace"))
    raylets = {pid for pid, (_, line) in processes.items() if "raylet" in line and f"_{command}/" in line}
    name = "ServeReplica:ragkv:AnswerReplica"
    return [pid for pid, (parent, line) in processes.items() if parent in raylets and name in line]


def test_why_replicas_do_not_start_is_found():
    message = "It failed 3 times.\nTraceback:\n  File x\nragkv.errors.StoreError: a.ragkv: is not a pack\n"
    made = SimpleNamespace(deployments={"Front": SimpleNamespace(message=message)})
    for known, wanted in [({"ragkv": made}, "a.ragkv: is not a pack"), ({}, "it failed")]:
        assert on_ray._reason(SimpleNamespace(applications=known), RuntimeError("x\nit failed")) == wanted
