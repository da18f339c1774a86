"""An index with vectors in Qdrant: the same hits as with FAISS, and the index is authoritative."""

import json
import shutil
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

import numpy as np
import pytest
import words
from indexed import PAIR, write_texts
from prometheus_client import CollectorRegistry, generate_latest
from typer.testing import CliRunner

from ragkv import RagKV
from ragkv.cli.main import app
from ragkv.config import IndexConfig, QdrantConfig
from ragkv.errors import ConfigError, RetrievalError
from ragkv.retrievers import qdrant
from ragkv.retrievers.arrays import id_key
from ragkv.retrievers.qdrant import Point
from ragkv.server.metrics import IndexMetrics

TEXTS = PAIR | {
    "sub/tarn.md": "# Tarn\n\nTarn lies on the river Ister. Its mayor is Ann Lee.\n",
    "sub/same.txt": PAIR["bolt.txt"],
    "empty.txt": "?!",
}
QUESTIONS = ("Who founded Halden Works?", "Ann Lee of Bolt Ltd", "the river Ister", "zither")
WHERE = ((), ("source=bolt.txt",), ("source=*.md",), ("source=tarn.md", "source=bolt*"), ("title=Tarn", "source=*"))


@pytest.fixture
def documents(tmp_path):
    return write_texts(tmp_path / "documents", TEXTS)


@pytest.fixture
def make(tmp_path, model_folder, monkeypatch):
    words.install(monkeypatch)
    monkeypatch.setattr(qdrant, "_memory", {})

    def made(name, url="memory://", **settings):
        settings = {"embedder": "words", "chunk_tokens": 128, "kv": "on-demand", "device": "cpu", **settings}
        place = QdrantConfig(**url) if isinstance(url, dict) else QdrantConfig(url=url)
        return RagKV.create(tmp_path / name, model=str(model_folder), qdrant=place, **settings)

    return made


def hits(rag, where=()):
    return {
        (question, mode): [
            (each.source, each.retrieval_score, each.score)
            for each in rag.retrieve(question, retrieval=mode, where=where, top_k=3, rerank=False)
        ]
        for question in QUESTIONS
        for mode in ("dense", "sparse", "colbert", "hybrid")
    }


def state(rag):
    return rag.maintenance.verify().derived["qdrant"]


def test_it_finds_what_faiss_finds_after_every_change(make, documents, tmp_path, monkeypatch):
    with make("qdrant") as rag, make("faiss", url="") as other:
        assert hits(rag) == hits(other) == {key: [] for key in hits(rag)}  # still empty
        for step in range(3):
            for each in (rag, other):
                if step == 1:
                    (documents / "bolt.txt").write_text("Bolt Ltd makes gears now, and zithers.")
                if step == 2:
                    (documents / "sub/tarn.md").unlink(missing_ok=True)
                    each.delete(str(documents / "sub/tarn.md"))
                    continue
                monkeypatch.setattr(qdrant, "BATCH", step + 1)
                each.ingest(documents)
            for where in WHERE[: 3 if step > 1 else None]:
                assert hits(rag, where) == hits(other, where), (step, where)
            assert state(rag) == "current"
        assert not {path.name for path in (tmp_path / "qdrant" / "derived").iterdir()} & {"dense", "sparse"}
        assert rag.index.collection.dropped == 0


def test_only_changed_documents_are_sent_and_what_was_interrupted_goes_on(make, documents, monkeypatch):
    sent = []
    with make("index") as rag:
        collection = rag.index.collection
        call = collection._call

        def counted(method, **arguments):
            if method == "upsert":
                if len(sent) == 2:
                    raise RetrievalError("it went away")
                sent.extend(point.payload["chunk"] for point in arguments["points"])
            return call(method, **arguments)

        monkeypatch.setattr(qdrant, "BATCH", 1)
        monkeypatch.setattr(collection, "_call", counted)
        rag.ingest(documents)
        assert len(sent) == 2
        with pytest.raises(RetrievalError, match="it went away"):
            rag.retrieve("Ann Lee", retrieval="dense")
        sent.append("")
        rag.retrieve("Ann Lee", retrieval="dense")
        assert set(sent[3:]) == {chunk.chunk_id for chunk in rag.store.chunks()}
        sent[:] = [""] * 3
        (documents / "bolt.txt").write_text("Bolt Ltd makes gears now.")
        rag.ingest(documents)
        rag.ingest(documents)
        assert [rag.store.chunk(chunk_id).text for chunk_id in sent[3:]] == ["Bolt Ltd makes gears now."]
        assert state(rag) == "current"


def test_the_index_is_the_truth(make, documents, tmp_path):
    """Foreign points are dropped from hits, counted and deleted; missing ones are sent again; a false payload has no
    effect.
    """
    with make("index") as rag:
        rag.ingest(documents)
        before, collection = hits(rag), rag.index.collection
        ids = [chunk.chunk_id for chunk in rag.store.chunks()]
        query = rag.index.encoders.embedder.embed_query("Ann Lee of Bolt Ltd").dense[0]
        stranger = {"chunk_id": "stranger", "terms": [], "vectors": {"dense": query}}
        collection.send([Point(**stranger)], "")
        assert hits(rag) == before
        assert collection.dropped > 0
        registry = CollectorRegistry()
        registry.register(IndexMetrics({"index": rag}.items()))
        assert (
            f'ragkv:qdrant_dropped_total{{model_name="index"}} {collection.dropped}'
            in generate_latest(registry).decode()
        )
        assert "1 points are left over: ragkv repair sends all again" in state(rag)
        lies = {"chunk": ids[1], "terms": []}
        collection._call("overwrite_payload", payload=lies, points=[qdrant.point_id(id_key(ids[0]))])
        collection.drop([id_key(ids[2]), id_key(ids[3])])
        assert "1 chunks are missing" in state(rag)
        index = ["--index", str(tmp_path / "index")]
        ran = CliRunner().invoke(app, ["repair", *index])
        assert (ran.exit_code, f"{len(ids)} points sent to Qdrant" in ran.stdout) == (0, True), ran.output
        assert state(rag) == "current"
        assert hits(rag) == before
        qdrant._memory.clear()  # a server that lost its data
        with RagKV.open(tmp_path / "index", device="cpu") as again:
            assert hits(again) == before
        verified = CliRunner().invoke(app, ["verify", *index, "--json"])
        assert json.loads(verified.stdout)["derived"]["qdrant"] == "current"


def test_another_indexs_or_embedders_collection_is_refused(make, documents, tmp_path, monkeypatch):
    shared = {"url": "memory://", "collection": "shared"}
    with make("one", url=shared) as one, make("two", url=shared) as two:
        one.ingest(documents)
        before = hits(one)
        two.ingest(documents)  # committed to the index, and not sent to Qdrant
        with pytest.raises(RetrievalError, match="of another index: name another collection"):
            two.retrieve("Ann Lee", retrieval="dense")
        assert "of another index" in state(two)
        assert two.retrieve("Ann Lee", retrieval="bm25")
        assert hits(one) == before
    with RagKV.open(tmp_path / "one", device="cpu", readonly=True) as reader:
        assert hits(reader) == before
        reader.index.collection.drop([id_key(chunk.chunk_id) for chunk in reader.store.chunks()])
        assert not any(hits(reader).values())  # a read-only index does not send them again
    shutil.copytree(tmp_path / "one", tmp_path / "copy")  # a replica of the same index
    with RagKV.open(tmp_path / "copy", device="cpu") as copy:
        copy.maintenance.repair()
        assert hits(copy) == before
        client = copy.index.collection._client
        facts = client.get_collection("shared").config.metadata["ragkv"]
        client.update_collection("shared", metadata={"ragkv": {**facts, "embedder": "another"}})
        copy.index.collection.version = None
        with pytest.raises(RetrievalError, match="another embedder; run ragkv repair"):
            copy.retrieve("Ann Lee", retrieval="dense")
        copy.maintenance.repair()
        assert hits(copy) == before
        client.update_collection("shared", metadata={"ragkv": None})
        copy.index.collection.version = None
        with pytest.raises(RetrievalError, match="not of ragkv's making"):
            copy.retrieve("Ann Lee", retrieval="dense")
        assert copy.maintenance.repair().points == 0  # with a warning


def test_a_pack_and_a_replaced_empty_index(make, documents, tmp_path):
    from ragkv.index.create import kept_settings
    from ragkv.index.pack import unpack

    with make("index") as rag:
        rag.ingest(documents)
        assert kept_settings(tmp_path / "index")["qdrant"] == rag.config.qdrant
        rag.pack(tmp_path / "pack", names=["*bolt*"])
    unpack(tmp_path / "pack", tmp_path / "there", device="cpu")
    with RagKV.open(tmp_path / "there", device="cpu") as there:
        assert (there.config.qdrant, there.store.get_meta("qdrant")) == (QdrantConfig(), None)


class Answers(BaseHTTPRequestHandler):
    """A server that answers every request with the status in its path, or not at all."""

    go = Event()

    def do_GET(self):
        status = int(self.path.split("/")[1])
        assert status or self.go.wait(600)
        body = b'{"status": {"error": "no"}}' if status != 200 else b"<html>"
        self.send_response(status or 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Suppress the log."""


for _method in ("do_PUT", "do_POST", "do_DELETE", "do_PATCH"):
    setattr(Answers, _method, Answers.do_GET)


@pytest.mark.parametrize("status", [None, 0, 200, 401, 500])
def test_a_server_that_fails_is_named_in_a_sentence(make, documents, tmp_path, status):
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        Answers.go.clear()
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        url = "http://127.0.0.1:1" if status is None else f"http://127.0.0.1:{server.server_port}/{status}"
        try:
            with make("index", url={"url": url, "timeout": 1}) as rag:
                assert len(rag.ingest(documents).added) == len(TEXTS)  # the ingest succeeds
                with pytest.raises(
                    RetrievalError, match=r"of Qdrant at http://.* cannot be used \(.+\); see \[qdrant\]"
                ):
                    rag.retrieve("Ann Lee", retrieval="dense")
                assert "cannot be used" in state(rag)
            if status is None:
                command = ["query", "Ann Lee", "--index", str(tmp_path / "index"), "--retrieval", "dense"]
                ran = CliRunner().invoke(app, command)
                assert (ran.exit_code, "Traceback" in ran.output) == (1, False)
        finally:
            Answers.go.set()
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ('url = "file:///folder"', "must be a URL"),
        ('url = "http://user:password@host"', "without a user or password"),
        ('url = "http://["', "a host and a port"),
        ('collection = "../a"', "letters, digits"),
        ('api_key = "A B"', "environment variable"),
        ("timeout = 0", "from 1 to 600, not 0"),
        ('colour = "red"', "unknown key 'colour'"),
    ],
)
def test_wrong_settings_are_named(table, says):
    with pytest.raises(ConfigError, match=says):
        IndexConfig.from_toml(f"[qdrant]\n{table}\n")


def test_a_key_that_is_not_set_is_named(monkeypatch):
    monkeypatch.delenv("QDRANT_KEY", raising=False)
    with pytest.raises(ConfigError, match="QDRANT_KEY, which is not set"):
        qdrant.QdrantCollection(QdrantConfig(url="http://h", api_key="QDRANT_KEY"), "index")


def test_a_server_that_ignores_filters_adds_no_chunk(monkeypatch):
    vectors = {f"c{number:03}": np.eye(3, dtype=np.float16)[number % 2] for number in range(120)}
    collection = qdrant.QdrantCollection(QdrantConfig(url="memory://ignores"), "index")
    collection.make("e", ["dense"], 3)
    points = (Point(chunk_id=name, terms=[], vectors={"dense": vector}) for name, vector in vectors.items())
    assert collection.send(points, "") == 120
    index = qdrant.QdrantIndex(
        collection=collection, score_kind="dense", vectors=lambda names: {name: vectors[name] for name in names}
    )
    monkeypatch.setattr(collection, "filters", lambda among: iter([None]))
    hits = index.search(np.array([1, 0, 0], np.float32), 2, among=["c001", "c004"])
    assert [hit.chunk_id for hit in hits] == ["c004", "c001"]
