"""`ragkv show` and `ragkv ls`: the content of an index, shown without a model."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ragkv import RagKV
from ragkv.store import ChunkVectors, Store
from ragkv.store.tables import parse_document
from ragkv.types import Chunk, Document

CONDITIONS = (
    ("ls", "--where", "source=*.md"),
    ("ls", "--where", "source=*.txt", "--limit", 1),
    ("stats", "--per-document", "--where", "source=b*"),
)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("shown")
    (folder / "notes").mkdir()
    long = " ".join(
        f"Halden{n} Works was founded by Mira{n} Oskel." for n in range(60)
    )  # more than 16 chunks: two ids have a common prefix
    (folder / "notes" / "halden.md").write_text(f"# Halden Works\n\n{long}\n")
    (folder / "bolt.txt").write_text("Bolt Ltd makes valves. Bolt Ltd was founded by Ann Lee in Varn.")
    (folder / "copy.txt").write_text("Bolt Ltd makes valves. Bolt Ltd was founded by Ann Lee in Varn.")
    settings = {"chunk_tokens": 128, "codec": "zstd", "tuning": {"block": {"over": "standalone"}}}
    with RagKV.create(folder / "index", model=str(model_folder), device="cpu", **settings) as rag:
        rag.ingest(folder / "notes", folder / "bolt.txt", folder / "copy.txt")
    return folder / "index"


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch, no_model: None) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_a_chunk_with_all_that_is_kept_of_it(ragkv, index):
    found = json.loads(ragkv("show", "halden.md:1", "--index", index, "--json").out)
    with RagKV.open(index, readonly=True) as rag:
        halden = [chunk for chunk in rag.store.chunks() if chunk.document_id.endswith("halden.md")]
        text = rag.store.text(halden[0].document_id)
    assert len(halden) > 16  # so that two ids have a common prefix
    assert text is not None
    chunk = halden[1]
    assert (found["chunk_id"], found["ordinal"], found["text"]) == (chunk.chunk_id, 1, chunk.text)
    assert text[found["start"] : found["end"]].strip() == chunk.text.strip()
    assert found["tokens"] == len(chunk.token_ids)
    assert (found["before"], found["after"]) == (halden[0].chunk_id, halden[2].chunk_id)
    assert found["document"]["source"] == "halden.md"
    assert [record["encoding"] for record in found["kv"]] == ["prefixed", "standalone"]
    for record in found["kv"]:
        assert record["codec"] == "zstd"
        assert 0 < record["bytes"] < record["raw_bytes"]
        assert record["raw_bytes"] == 2 * 3 * 2 * 16 * 4 * len(chunk.token_ids)  # two of layers x heads x dim x fp32
        assert record["shared_by"] == 1
    assert found["kv"][0]["prefix_tokens"] > 0 == found["kv"][1]["prefix_tokens"]
    assert found["vectors"] == {}


def test_for_people(ragkv, index):
    shown = ragkv("show", "halden.md:0", "--index", index)
    assert shown.code == 0, shown.err
    for part in ("chunk 0", "KV, standalone", "zstd", "after a prefix of", "before", "none", "# Halden Works"):
        assert part in shown.out
    assert all(line[0] != " " for line in shown.out.split("# Halden Works")[0].splitlines() if line)  # not wrapped
    plain = ragkv("show", "bolt.txt:0", "--index", index, "--quiet").out
    assert plain == "Bolt Ltd makes valves. Bolt Ltd was founded by Ann Lee in Varn.\n"
    assert "shared by 2 chunks" in " ".join(ragkv("show", "bolt.txt:0", "--index", index).out.split())


def test_by_id_and_by_its_start(ragkv, index):
    with RagKV.open(index, readonly=True) as rag:
        ids = sorted(chunk.chunk_id for chunk in rag.store.chunks())
    for name in (ids[0], ids[0][:12]):
        assert json.loads(ragkv("show", name, "--index", index, "--json").out)["chunk_id"] == ids[0]
    shared = next(a[0] for a, b in pairwise(ids) if a[0] == b[0])
    several = ragkv("show", shared, "--index", index)
    assert (several.code, "begins several ids" in several.sentence) == (2, True)


def test_ls_lists_what_a_pattern_and_conditions_choose(ragkv, index):
    every = json.loads(ragkv("ls", "--index", index, "--json").out)["documents"]
    assert [one["source"] for one in every] == ["bolt.txt", "copy.txt", "halden.md"]
    stats = json.loads(ragkv("stats", "--index", index, "--json").out)
    for name in ("chunks", "tokens"):
        assert sum(one[name] for one in every) == stats[name]
    for arguments, sources in (
        (("*.txt",), ["bolt.txt", "copy.txt"]),
        (("--where", "source=*.md"), ["halden.md"]),
        (("*.txt", "--where", "source=b*"), ["bolt.txt"]),
        (("halden.md",), ["halden.md"]),
    ):
        found = json.loads(ragkv("ls", *arguments, "--index", index, "--json").out)["documents"]
        assert [one["source"] for one in found] == sources
    shown = ragkv("ls", "--index", index)
    assert "halden.md" in shown.out
    assert "3 documents" in shown.err
    assert ragkv("ls", "*.md", "--index", index, "--quiet").out == f"{index.parent / 'notes' / 'halden.md'}\n"


def test_ls_goes_page_by_page_and_reads_no_more_than_it_shows(ragkv, index, monkeypatch):
    every = json.loads(ragkv("ls", "--index", index, "--json").out)
    assert (every["after"], every["total"]) == (None, 3)
    read = []
    monkeypatch.setattr("ragkv.store.store.parse_document", lambda row: (read.append(1), parse_document(row))[1])
    for choice in ((), ("--where", "source=*")):
        found, after = [], ""
        while after is not None:
            read.clear()
            page = json.loads(ragkv("ls", *choice, "--index", index, "--limit", 1, "--after", after, "--json").out)
            assert choice or len(read) <= 3  # --after's document, and one to see whether there are more
            assert len(page["documents"]) == 1
            found += page["documents"]
            after = page["after"]
        assert found == every["documents"]
    shown = ragkv("ls", "--index", index, "--limit", 2)
    assert f"--after {every['documents'][1]['document']}" in shown.err
    assert "halden.md" not in shown.out
    named = ragkv("ls", "--index", index, "--after", "copy.txt", "--quiet")  # as listed
    assert named.out.splitlines() == [every["documents"][2]["document"]]
    assert "3 documents" in ragkv("ls", "--index", index, "--after", "*.txt").err  # ambiguous
    assert "no more documents (of 3)" in ragkv("ls", "--index", index, "--after", "~").err
    assert ragkv("ls", "--index", index, "--limit", -1).code == 2


def test_ls_and_stats_with_conditions_read_no_other_documents(ragkv, index, monkeypatch):
    expected = [ragkv(*asked, "--index", index, "--json").out for asked in CONDITIONS]
    shutil.rmtree(index / "derived" / "fields")
    assert [ragkv(*asked, "--index", index, "--json").out for asked in CONDITIONS] == expected
    with RagKV.open(index, device="cpu") as rag:
        rag.retrieve("x", where=["source=*.md"])  # rebuilds the index of fields
    monkeypatch.setattr(Store, "documents", lambda *_, **__: pytest.fail("all documents are read"))
    assert [ragkv(*asked, "--index", index, "--json").out for asked in CONDITIONS] == expected
    with RagKV.open(index, device="cpu") as rag:
        found = rag.retrieve("Bolt Ltd", where=["source=b*"], only=lambda document, chunk: "Bolt" in chunk.text)
        assert {one.source for one in found} == {"bolt.txt"}
        assert {one.document.source for one in rag.select(where=["source=*.md"])} == {"halden.md"}


def test_stats_and_delete_take_conditions(ragkv, index):
    payload = json.loads(ragkv("stats", "--index", index, "--per-document", "--where", "source=b*", "--json").out)
    assert [one["source"] for one in payload["per_document"]] == ["bolt.txt"]
    dry = ("delete", "--index", index, "--dry-run")
    assert ragkv(*dry, "--where", "source=*.md").out == f"would delete {index.parent / 'notes' / 'halden.md'}\n"
    assert ragkv(*dry, "*.txt", "--where", "source=c*").out == f"would delete {index.parent / 'copy.txt'}\n"


def test_an_empty_index_is_said_to_be_so(ragkv, tmp_path, model_folder):
    RagKV.create(tmp_path / "empty", model=str(model_folder)).close()
    found = ragkv("ls", "--index", tmp_path / "empty")
    assert (found.code, found.out) == (0, "")
    assert "holds no document" in found.err


def test_vectors_are_told_by_kind(ragkv, tmp_path, model_folder):
    chunk = Chunk(chunk_id="c0", document_id="d", ordinal=0, text="Halden.", token_ids=(1, 2), start=0, end=7, page=3)
    vectors = ChunkVectors(dense=np.ones(8, np.float32), sparse={"5": 0.5}, colbert=np.ones((2, 4), np.float16))
    with RagKV.create(tmp_path / "index", model=str(model_folder)) as rag:
        document = Document(document_id="d", source="d.pdf", content_hash="0")
        rag.store.write_document(
            document, "Halden.", [chunk], recipe="r", references={}, vectors={chunk.chunk_id: vectors}
        )
    found = json.loads(ragkv("show", "c0", "--index", tmp_path / "index", "--json").out)
    assert found["vectors"] == {"dense": "8 float32", "sparse": "1 weights", "colbert": "2 x 4 float16"}
    assert (found["kv"], found["page"]) == ([], 3)
    shown = ragkv("show", "d.pdf:0", "--index", tmp_path / "index").out
    assert "page 3" in shown
    assert "none: the question that needs it encodes it" in shown
