"""A disk that fills up during an ingest: a one-sentence error, an index that answers from the committed documents, and
a rerun that completes once there is space.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from clichild import CliChild, run_script
from namespace import namespace
from nightly import NIGHTLY

from ragkv import RagKV
from ragkv.config import load_config
from ragkv.store import Store
from ragkv.store.record import Manifest

DOCUMENTS = 4
MEBIBYTES = {"tmpfs": 4, "limit": 6}
"""Room for some of the documents: a disk counts written pages, a quota the file's length."""


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    for d in range(DOCUMENTS):
        facts = (f"Halden{d}{n} Works was founded by Mira{n} Oskel. Its seat is Varn{d}{n}." for n in range(20))
        (folder / f"{d}.txt").write_text(" ".join(facts))
    return folder


@pytest.fixture(scope="module")
def undisturbed(documents: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    index = tmp_path_factory.mktemp("undisturbed") / "index"
    with RagKV.create(index, model="mini", engines=("block",)) as rag:
        rag.ingest(documents)
        rag.query("Who founded Halden00 Works?")  # which stores the prefix's KV
    return index


def content(index: Path) -> tuple[dict[str, Any], dict[bytes, Any]]:
    """The content of an ingest by id, and KV by key."""
    with Store.open(index, readonly=True) as store:
        rows = {
            stored.document.document_id: (stored.document, stored.recipe, store.text(stored.document.document_id))
            for stored in store.documents()
        }
        rows |= {chunk.chunk_id: chunk for chunk in store.chunks()}
        with store._live().read() as txn:
            manifests = {key: bytes(value) for key, value in txn.scan("kv")}
        assert list(store.maintenance.orphans()) == []
        assert store._live().check_pages().unaccounted == 0
        identities = {key: Manifest.parse(value).identity for key, value in manifests.items()}
        return rows, {key: store.get_kv(identity) for key, identity in identities.items()}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["tmpfs", "limit"])
def test_a_full_disk(way: str, documents: Path, undisturbed: Path, tmp_path: Path) -> None:
    if way == "tmpfs" and namespace() is None:
        pytest.skip("no mount namespace to make a small disk in: the quota on file sizes is tried instead")
    if way == "limit" and namespace() is not None and not NIGHTLY:
        pytest.skip("a small disk was tried; make test-all tries both")
    index, copy = tmp_path / "place" / "index", tmp_path / "copy"
    index.parent.mkdir()
    payload = json.loads(run_script("fulldisk", way, MEBIBYTES[way], index, documents, copy))

    full = payload["full"]
    assert (full["code"], full["out"]) == (1, "")
    sentences = [line for line in full["err"].splitlines() if not line.startswith(("Using the bundled", "mini knows"))]
    assert len(sentences) == 1, full["err"]
    assert "is full" in sentences[0]
    assert "make room and try again" in sentences[0]

    assert payload["room"]["code"] == 0, payload["room"]["err"]
    report = json.loads(payload["room"]["out"])
    committed = {str(name) for name in report["unchanged"]}
    assert 0 < len(committed) < DOCUMENTS
    assert len(report["added"]) == DOCUMENTS - len(committed)

    assert payload["answer"]["code"] == 0, payload["answer"]["err"]
    sources = json.loads(payload["answer"]["out"])["sources"]
    assert sources
    assert {source["document"] for source in sources} <= {Path(name).name for name in committed}

    assert payload["again"]["code"] == 0, payload["again"]["err"]
    rows, tensors = content(copy if way == "tmpfs" else index)
    expected_rows, expected_tensors = content(undisturbed)
    assert rows == expected_rows
    assert tensors.keys() == expected_tensors.keys()
    for key, kv in tensors.items():
        other = expected_tensors[key]
        for one, two in zip((*kv.keys, *kv.values), (*other.keys, *other.values), strict=True):
            torch.testing.assert_close(one, two)  # another batch size rounds differently


SETTING = """
import shutil, subprocess, sys
from pathlib import Path
from namespace import enter
from ragkv.cli.main import main

enter()
made, place, copy = map(Path, sys.argv[1:])
size = sum(path.stat().st_size for path in made.rglob("*")) + (1 << 20)
subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", place], check=True)
index = shutil.copytree(made, place / "index")
(index / "ragkv.toml").write_text("# mine\\n" + (index / "ragkv.toml").read_text())
try:
    with (place / "filler").open("wb", buffering=0) as filler:
        while filler.write(bytes(4096)):
            pass
except OSError:
    pass
sys.argv = ["ragkv", "config", "set", "kv_budget=100KB", "top_k=7", "--index", str(index)]
try:
    main()
finally:
    shutil.copytree(index, copy)
"""


def test_a_smaller_budget_is_set_on_a_full_disk(undisturbed: Path, tmp_path: Path) -> None:
    if namespace() is None:
        pytest.skip("no mount namespace to make a small disk in")
    (tmp_path / "place").mkdir()
    with Store.open(undisturbed, readonly=True) as store:
        was = store.stats().kv_bytes
    code, _, message = CliChild(undisturbed, tmp_path / "place", tmp_path / "copy", program=SETTING).end()
    assert code == 0, message
    config = load_config(tmp_path / "copy")
    assert (config.kv_budget, config.top_k) == ("100KB", 7)
    assert (tmp_path / "copy" / "ragkv.toml").read_text().startswith("# mine\n")
    assert not list((tmp_path / "copy").glob("ragkv.toml.*"))
    with Store.open(tmp_path / "copy", readonly=True) as store:
        assert store.stats().kv_bytes <= 100_000 < was
