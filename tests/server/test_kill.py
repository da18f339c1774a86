"""kill -9 of a server that ingests and answers: commits are kept, and a restart works."""

import json
import shutil

import httpx
import pytest
from live import PATIENCE
from servechild import ServeChild

from ragkv import RagKV

pytestmark = pytest.mark.slow

QUESTION = "Who founded Halden Works?"
FILES = {f"{number:02}.txt": f"Company {number} makes bolts of kind {number}. " * 6 for number in range(8)}
ASKED = {"question": QUESTION, "engine": "block", "max_new_tokens": 40, "where": ["source=halden.md"]}


def sent(files):
    return [("files", (name, text.encode())) for name, text in files.items()]


def documents(client):
    return {found["source"] for found in client.get("/documents").json()["documents"]}


def ended(client, job):
    """The job, after it has ended."""
    with client.stream("GET", f"/jobs/{job['id']}/events") as events:
        lines = [line for line in events.iter_lines() if line.startswith("data: ")]
    return json.loads(lines[-1].removeprefix("data: "))["job"]


def asking(child):
    return httpx.Client(base_url=f"{child.live.root}/api/indexes/own", timeout=PATIENCE)


@pytest.mark.parametrize("commits", [pytest.param(0, marks=pytest.mark.nightly), 3])
def test_a_killed_server_loses_nothing_that_was_committed(folder, tmp_path, commits):
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    with RagKV.open(own, device="cpu") as rag:
        expected = rag.query(QUESTION, engine="block", max_new_tokens=40, where=["source=halden.md"]).text
    child = ServeChild(own, commits)
    try:
        with asking(child) as client, client.stream("POST", "/query", json={**ASKED, "stream": True}) as answer:
            before = documents(client)
            lines = answer.iter_lines()
            while not next(lines).startswith("event: token"):
                continue
            for files in (FILES, {"late.txt": "Late."}):
                client.post("/documents", files=sent(files)).raise_for_status()
            assert child.heard() == "held"
            child.kill()
            with pytest.raises(httpx.HTTPError):
                list(lines)
    finally:
        child.kill()
    child = ServeChild(own)
    try:
        with asking(child) as client:
            assert client.get("/jobs").json() == {"jobs": []}
            added = documents(client) - before
            assert added < set(FILES)
            assert bool(added) == bool(commits)
            assert client.post("/query", json=ASKED).json()["answer"] == expected
            report = ended(client, client.post("/documents", files=sent(FILES)).json()["job"])["report"]
            assert (len(report["added"]), len(report["unchanged"])) == (len(FILES) - len(added), len(added))
            assert documents(client) == before | set(FILES)
        assert child.stop() == 0
    finally:
        child.kill()
    with RagKV.open(own, device="cpu") as rag:
        assert rag.maintenance.verify().ok
        assert rag.query(QUESTION, engine="block", max_new_tokens=40, where=["source=halden.md"]).text == expected
