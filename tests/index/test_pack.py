"""Packs: another index answers from them without encoding; damaged, foreign or mismatched packs are refused."""

import json
import os
import random
import shutil
from hashlib import blake2b
from pathlib import Path

import pytest
from indexed import indexed

from ragkv import RagKV
from ragkv.errors import KVMismatchError, RagkvError, StoreError, StoreFullError, UsageError
from ragkv.index.maintenance import copy_index
from ragkv.index.pack import MAGIC, unpack
from ragkv.store import Store
from ragkv.store.maintenance.maintenance import Maintenance

TEXTS = {
    "halden.txt": "Halden Works was founded by Mira Oskel in 1907.",
    "bolt.txt": "Bolt Ltd makes valves. Bolt Ltd was founded by Ann Lee in Varn, far from any sea.",
}
QUESTION = "Who founded Bolt Ltd?"


@pytest.fixture
def rag(tmp_path, model_folder):
    settings = {"engines": ("block",), "tiers": [{"url": f"file://{tmp_path}/objects"}], "chunk_tokens": 128}
    with indexed(tmp_path, TEXTS, model=model_folder, **settings) as rag:
        rag.maintenance.settle()  # else the tier's files appear while a test compares folders
        yield rag


@pytest.mark.parametrize("names", [(), ("*bolt*",)])
def test_a_pack_answers_elsewhere_and_encodes_nothing(rag, tmp_path, names):
    made = rag.pack(tmp_path / "pack", names=names)
    assert unpack(tmp_path / "pack", tmp_path / "there", device="cpu").fingerprint == made.fingerprint
    assert made.documents == (len(names) or 2)
    with RagKV.open(tmp_path / "there", device="cpu") as there:
        assert there.config.tiers == ()
        answer = there.query(QUESTION, engine="block")
        assert (answer.kv.hits, answer.kv.misses) == (made.documents, 0)
        assert names or answer.text == rag.query(QUESTION, engine="block").text
        assert there.maintenance.verify().ok
        there.ingest(tmp_path / "bolt.txt")  # it is an ordinary index
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_pack_of_chosen_documents_holds_nothing_of_the_others(rag, tmp_path):
    rag.query("Who founded Halden Works?", engine="block")
    rag.maintenance.settle()
    rag.pack(tmp_path / "pack", names=["*bolt*"])
    packed = (tmp_path / "pack").read_bytes()
    assert b"Ann Lee" in packed
    assert b"Mira Oskel" not in packed


def test_the_others_are_deleted_together(rag, tmp_path, monkeypatch):
    """From the copy: with a transaction for each, few of 50,000 documents took minutes."""
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"{name} was founded by Tom Varn.")
        rag.ingest(tmp_path / f"{name}.txt")
    together = []
    monkeypatch.setattr(Store, "delete_documents", lambda self, ids: together.append([Path(each).name for each in ids]))
    rag.pack(tmp_path / "pack", names=["*bolt*"])
    assert together == [["a.txt", "b.txt", "c.txt", "halden.txt"]]


def test_a_document_that_is_ingested_meanwhile_is_not_packed(rag, tmp_path, monkeypatch):
    def copy(*given, **more):
        (tmp_path / "late.txt").write_text("Late Mill was founded by Tom Varn.")
        rag.ingest(tmp_path / "late.txt")
        return copy_index(*given, **more)

    monkeypatch.setattr("ragkv.index.pack.copy_index", copy)
    assert rag.pack(tmp_path / "pack", names=["*bolt*"]).documents == 1
    assert b"Late Mill" not in (tmp_path / "pack").read_bytes()


def test_one_flipped_byte_anywhere_is_refused(rag, tmp_path):
    """In the header, in the manifest, in the files, and at a wrong end: a one-sentence error that leaves nothing
    behind.
    """
    rag.pack(tmp_path / "pack", names=["*bolt*"])
    whole, dice = (tmp_path / "pack").read_bytes(), random.Random(5)
    head, length = len(MAGIC) + 4, int.from_bytes(whole[len(MAGIC) :][:4], "little")
    places = [*range(head), *dice.sample(range(head, head + length), 60), *dice.sample(range(len(whole)), 25)]
    damages = [whole[:at] + bytes([whole[at] ^ 1 << dice.randrange(8)]) + whole[at + 1 :] for at in places]
    damages += [whole[:at] for at in (0, 5, 20, 500, len(whole) - 1)] + [whole + b"\0"]
    for damaged in damages:
        refused(tmp_path, damaged)


def refused(tmp_path, pack, says=".", **settings):
    """Check that unpacking these bytes fails with one sentence that matches `says`, and leaves nothing behind."""
    (tmp_path / "damaged").write_bytes(pack)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((StoreError, UsageError), match=says) as raised:
        unpack(tmp_path / "damaged", tmp_path / "new" / "there", device="cpu", **settings)
    assert "\n" not in str(raised.value)
    assert sorted(tmp_path.rglob("*")) == before


def forged(pack: Path, **changes: object) -> bytes:
    """The pack with another manifest, whose digest is right unless it is among the changes."""
    whole = pack.read_bytes()[len(MAGIC) :]
    end = 4 + int.from_bytes(whole[:4], "little")
    manifest = {**json.loads(whole[4:end]), **changes}
    if "settings" in changes and "blake2b" not in changes:
        manifest["blake2b"] = blake2b(str(manifest["settings"]).encode() + whole[end:], digest_size=32).hexdigest()
    packed = json.dumps(manifest).encode()
    return MAGIC + len(packed).to_bytes(4, "little") + packed + whole[end:]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"bytes": True}, "lacks something"),
        ({"bytes": -1}, "lacks something"),
        ({"bytes": 0}, "digest or its length"),
        ({"bytes": 1 << 62}, "ends early"),
        ({"blake2b": ""}, "digest or its length"),
        ({"settings": 3, "blake2b": ""}, "lacks something"),
        ({"settings": "x" * (1 << 20)}, "too long"),
        ({"settings": "\ud800", "blake2b": ""}, "cannot be read"),
        ({"settings": "other = 1\n"}, "/damaged/ragkv.toml: unknown key 'other'"),  # not the folder that is gone
    ],
)
def test_a_hostile_manifest_is_refused(rag, tmp_path, changes, says):
    """Also documents_only, which reads the settings all the same."""
    rag.pack(tmp_path / "pack", names=["*bolt*"])
    refused(tmp_path, forged(tmp_path / "pack", **changes), says=says)
    refused(tmp_path, forged(tmp_path / "pack", **changes), says=says, documents_only=True)


def test_what_cannot_be_read_is_not_called_what_cannot_be_written(tmp_path):
    if (unread := Path("/proc/self/mem")).is_file():
        with pytest.raises(StoreError, match="mem cannot be read"):
            unpack(unread, tmp_path / "there")


@pytest.mark.parametrize("step", ["copy", "collect"])
def test_a_full_disk_is_named_by_the_pack(rag, tmp_path, monkeypatch, step):
    def full(store, path=None, **_):
        raise StoreFullError(f"the disk under {path / 'store' if path else store._database.directory} is full")

    monkeypatch.setattr(Maintenance, step, full)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(StoreFullError, match=f"^the disk under {tmp_path / 'new'} is full$"):
        rag.pack(tmp_path / "new")
    assert sorted(tmp_path.iterdir()) == before


def test_what_is_no_file_or_a_link_is_no_pack_or_target(rag, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "index", "nothing"):
        with pytest.raises(UsageError, match="no pack"):
            unpack(tmp_path / name, tmp_path / "there")
    rag.pack(tmp_path / "pack")
    (tmp_path / "elsewhere").mkdir()
    for name, target in (("link", "elsewhere"), ("dangling", "gone")):
        (tmp_path / name).symlink_to(tmp_path / target)
        with pytest.raises(StoreError, match="cannot be written"):
            unpack(tmp_path / "pack", tmp_path / name, device="cpu")
    assert not [*(tmp_path / "elsewhere").iterdir(), *tmp_path.glob(".*")]
    assert not (tmp_path / "gone").exists()


def test_a_pack_is_never_written_over(rag, tmp_path):
    rag.pack(tmp_path / "pack")
    with pytest.raises(UsageError, match="exists already"):
        rag.pack(tmp_path / "pack")


def test_another_model_is_refused_and_may_encode_the_documents(rag, tmp_path, model_folder):
    from safetensors.torch import load_file, save_file

    rag.pack(tmp_path / "pack")
    other = tmp_path / "model"
    shutil.copytree(model_folder, other)
    [weights] = other.glob("*.safetensors")
    tensors = load_file(weights)
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, weights, metadata={"format": "pt"})
    with pytest.raises(KVMismatchError, match="--documents-only"):
        unpack(tmp_path / "pack", tmp_path / "there", model=str(other), device="cpu")
    assert not (tmp_path / "there").exists()
    report = unpack(tmp_path / "pack", tmp_path / "there", model=str(other), documents_only=True, device="cpu")
    assert report.encoded == 2
    with RagKV.open(tmp_path / "there", device="cpu") as there:
        assert there.query(QUESTION, engine="block").kv.misses == 0
    moved = tmp_path / "moved"
    shutil.copytree(model_folder, moved)
    assert unpack(tmp_path / "pack", tmp_path / "same", model=str(moved), device="cpu").encoded == 0


@pytest.mark.parametrize("manifest", [b"{}", b"[]", b"\xff", b'{"settings": ""}'])
def test_a_manifest_from_anywhere_is_an_error_in_words(tmp_path, manifest):
    head = len(manifest).to_bytes(4, "little")
    (tmp_path / "pack").write_bytes(MAGIC + head + manifest)
    with pytest.raises(RagkvError, match="not a pack"):
        unpack(tmp_path / "pack", tmp_path / "there")
