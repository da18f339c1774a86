"""Vectors of a benchmark's passages: what is read back, and that a killed run goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarkfolder import CountingEmbedder

from ragkv.errors import RetrievalError
from ragkv.evaluation import batch as module
from ragkv.evaluation.batch import Batches
from ragkv.evaluation.judgement import Passage

KINDS = ("dense", "sparse", "colbert")
PASSAGES = [Passage(passage_id=f"p{i}", text=f"passage {i} of {i % 3} é") for i in range(10)]
PASSAGES[4] = Passage(passage_id="empty", text="")


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_kind_comes_back_in_the_corpus_s_order(tmp_path):
    embedder = CountingEmbedder()
    batches = Batches(tmp_path, embedder, PASSAGES, KINDS, batch=4)
    steps = []
    assert batches.embed(lambda done, total: steps.append((done, total))) == 10
    assert steps == [(4, 10), (8, 10), (10, 10)]
    expected = embedder.embed_documents([passage.text for passage in PASSAGES])
    ids = [passage.passage_id for passage in PASSAGES]
    for kind in ("dense", "sparse"):
        assert [name for name, _ in getattr(batches, kind)()] == ids
    np.testing.assert_array_equal(np.stack([vector for _, vector in batches.dense()]), expected.dense)
    assert [weights for _, weights in batches.sparse()] == list(expected.sparse)
    late = batches.colbert(ids[::-1])
    assert list(late) == ids[::-1]
    for name, rows in zip(ids, expected.colbert, strict=True):
        found = late[name]
        assert found.shape == rows.shape
        np.testing.assert_allclose(found, rows, atol=5e-4)


def test_a_second_run_embeds_nothing_and_another_kind_only_itself(tmp_path):
    Batches(tmp_path, CountingEmbedder(), PASSAGES, ["dense"], batch=4).embed()
    before = _files(tmp_path)
    again = CountingEmbedder()
    assert Batches(tmp_path, again, PASSAGES, ["dense"], batch=4).embed() == 0
    assert again.texts == []
    assert Batches(tmp_path, CountingEmbedder(), PASSAGES, KINDS, batch=4).embed() == 10
    assert {name: data for name, data in _files(tmp_path).items() if ".dense" in name} == before


def test_only_batches_with_a_changed_passage_are_embedded_again(tmp_path):
    Batches(tmp_path, CountingEmbedder(), PASSAGES, KINDS, batch=4).embed()
    changed = [*PASSAGES[:9], Passage(passage_id="p9", text="something else")]
    embedder = CountingEmbedder()
    batches = Batches(tmp_path, embedder, changed, KINDS, batch=4)
    assert batches.embed() == 2
    assert embedder.texts == [passage.text for passage in changed[8:]]
    assert dict(batches.sparse())["p9"] == {"something": 1.0, "else": 1.0}


def test_another_embedder_reads_nothing_of_the_first(tmp_path):
    Batches(tmp_path, CountingEmbedder(), PASSAGES, ["dense"]).embed()
    other = CountingEmbedder()
    other.fingerprint = "f" * 64
    assert Batches(tmp_path, other, PASSAGES, ["dense"]).embed() == 10


@pytest.mark.parametrize("kind", [*KINDS, "ends"])
@pytest.mark.parametrize("damage", ["cut", "empty", "other"])
def test_a_damaged_file_is_made_again(tmp_path, kind, damage):
    Batches(tmp_path, CountingEmbedder(), PASSAGES, KINDS, batch=4).embed()
    before = _files(tmp_path)
    [victim, *_] = sorted(tmp_path.rglob(f"*.{kind}.*"))
    data = victim.read_bytes()
    victim.write_bytes({"cut": data[: len(data) // 2], "empty": b"", "other": b"not an array"}[damage])
    assert Batches(tmp_path, CountingEmbedder(), PASSAGES, KINDS, batch=4).embed() in (2, 4)
    assert _files(tmp_path).keys() == before.keys()
    batches = Batches(tmp_path, CountingEmbedder(), PASSAGES, KINDS, batch=4)
    assert batches.embed() == 0
    assert len(list(batches.dense())) == len(list(batches.sparse())) == 10
    assert len(batches.colbert([passage.passage_id for passage in PASSAGES])) == 10


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import os, signal
from benchmarkfolder import CountingEmbedder
from ragkv.evaluation.batch import Batches
from ragkv.evaluation.judgement import Passage
passages = [Passage(passage_id=f"p{i}", text=f"passage {i}") for i in range(40)]
writes, replace = int(sys.argv[3]), Path.replace
def count(self, target):
    global writes
    writes -= 1
    if writes < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return replace(self, target)
Path.replace = count
Batches(Path(sys.argv[1]), CountingEmbedder(), passages, ["dense", "sparse"], batch=4).embed()
"""


@pytest.mark.parametrize("writes", [0, 1, 7])
def test_a_killed_run_goes_on_where_it_was(tmp_path, writes):
    """Killed between writing a file and its rename: the whole files count, the torn one does not."""
    support = str(Path(sys.modules["benchmarkfolder"].__file__).parent)
    command = [sys.executable, "-c", KILLED, str(tmp_path / "work"), support, str(writes)]
    killed = subprocess.run(command, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)
    assert killed.returncode == -9, killed.stderr
    passages = [Passage(passage_id=f"p{i}", text=f"passage {i}") for i in range(40)]
    embedder = CountingEmbedder()
    batches = Batches(tmp_path / "work", embedder, passages, ["dense", "sparse"], batch=4)
    assert batches.embed() == 40 - 4 * (writes // 2)
    fresh = Batches(tmp_path / "fresh", CountingEmbedder(), passages, ["dense", "sparse"], batch=4)
    fresh.embed()
    for one, other in zip(batches.dense(), fresh.dense(), strict=True):
        assert one[0] == other[0]
        np.testing.assert_array_equal(one[1], other[1])
    assert list(batches.sparse()) == list(fresh.sparse())


def test_an_unwritable_folder_and_a_missing_kind_are_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RetrievalError, match="give another --work"):
        Batches(tmp_path / "file", CountingEmbedder(), PASSAGES, ["dense"]).embed()
    embedder = CountingEmbedder()
    embedder.embed_documents = lambda texts: type(embedder)().embed_query("one")
    with pytest.raises(RetrievalError, match="gave 1 dense vectors for 10 passages"):
        Batches(tmp_path, embedder, PASSAGES, ["dense"]).embed()


def test_a_full_disk_leaves_no_torn_file(tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(RetrievalError, match="No space left"):
        Batches(tmp_path, CountingEmbedder(), PASSAGES, ["dense"]).embed()
    assert _files(tmp_path) == {}
