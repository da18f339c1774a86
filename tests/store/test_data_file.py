"""A data file that LMDB would crash on is refused before it is mapped."""

import os
import struct
import sys
from pathlib import Path

import pytest
from clichild import CliChild
from namespace import namespace
from package import in_child
from storekit import write

from ragkv.errors import CorruptStoreError, StoreError
from ragkv.store import Store
from ragkv.store.data_file import file_system, give_back, read_header
from ragkv.types import Document

MOUNTS = r"""21 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 21 0:40 / /mnt/team rw shared:9 - nfs4 nas:/team rw
31 21 0:41 / /mnt/with\040space rw - cifs //nas/x rw
32 30 0:42 / /mnt/team/local rw master:3 - tmpfs none rw
33 21 0:43 / /over rw - ext4 /dev/vdb rw
34 21 0:44 / /over rw - fuse.sshfs me@far: rw
35 21 0:45 / /mnt/ODD rw - nfs4 nas:/odd rw
""".replace("ODD", "caf\udce9\u2028de\u00a0la")


def test_a_system_that_cannot_allocate_blocks_in_advance_has_no_reserve(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate", raising=False)  # as on macOS
    with Store.create(tmp_path / "index") as store:
        write(store, "a", (1, 2, 3))
    with Store.open(tmp_path / "index") as store:
        assert store.delete_document("a")


@pytest.fixture
def data(store: Store) -> Path:
    write(store, "a", tuple(range(100)), tuple(range(200)))
    store.close()
    return store.directory / "data.mdb"


def test_the_header_says_how_much_of_the_file_is_used(data, tmp_path):
    header = read_header(data)
    assert header is not None
    assert header.used < header.map_size == data.stat().st_size
    with data.open("r+b") as file:
        file.truncate(header.used)
    with Store.open(data.parent.parent) as opened:
        assert len(list(opened.chunks())) == 2
    assert read_header(tmp_path / "data.mdb") is None


def test_a_map_that_only_the_meta_page_claims_is_not_made(data):
    """The claimed size is the whole address space, to which the next writer would extend the file."""
    before = data.stat().st_size
    with data.open("r+b") as file:
        for page in (0, 4096):
            file.seek(page + 32)  # after its header, magic, version and address
            file.write(struct.pack("=Q", 1 << 46))
    header = read_header(data)
    assert header is not None
    assert header.map_size == before
    with Store.open(data.parent.parent) as opened:
        assert opened.sizes()[1] == before
        opened.put_meta("model", {"name": "other"})
        assert len(list(opened.chunks())) == 2
    assert data.stat().st_size == before


def test_a_cut_file_does_not_crash_the_interpreter(data):
    header = read_header(data)
    assert header is not None

    def look() -> None:
        for missing in (1, 4096, 20_000):
            os.truncate(data, header.used - missing)
            with pytest.raises(CorruptStoreError, match="cut short"):
                list(Store.open(data.parent.parent).chunks())

    assert in_child(look) == 0


@pytest.mark.parametrize("garbage", [b"", b"x", bytes(8192), b"\xff" * 100_000], ids=["empty", "byte", "zeros", "ones"])
@pytest.mark.parametrize("readonly", [False, True])
def test_garbage_is_refused(data, garbage, readonly):
    data.write_bytes(garbage)
    with pytest.raises(CorruptStoreError, match="ingest again" if garbage else "empty"):
        Store.open(data.parent.parent, readonly=readonly)


def test_another_lmdb_version_is_refused(data):
    with data.open("r+b") as file:
        file.seek(20)
        file.write(b"\2")
    with pytest.raises(StoreError, match="data version 2"):
        Store.open(data.parent.parent)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/home/me/index", "ext4"),
        ("/mnt/team/index", "nfs4"),
        ("/mnt/teammate", "ext4"),
        ("/mnt/team/local/index", "tmpfs"),
        ("/mnt/with space/x", "cifs"),
        ("/over/x", "fuse.sshfs"),
        ("/mnt/caf\udce9\u2028de\u00a0la/x", "nfs4"),
    ],
)
def test_file_system_is_that_of_the_nearest_mount(path, kind):
    assert file_system(Path(path), MOUNTS) == kind


def test_network_file_systems_are_refused(tmp_path, monkeypatch):
    Store.create(tmp_path).close()
    for kind in (b"nfs4", b"fuse.sshfs"):
        mounts = b"21 1 254:0 / / rw - " + kind + b" nas:/home rw\n22 21 0:40 / /caf\xe9 rw - tmpfs none rw\n"
        monkeypatch.setattr(Path, "read_bytes", lambda _, mounts=mounts: mounts)
        with pytest.raises(StoreError, match="local disk"):
            Store.open(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells where a file is mapped")
def test_what_is_given_back_reads_the_same(tmp_path):
    with Store.create(tmp_path) as store:
        texts = {f"doc-{n}": f"text {n} " * 200 for n in range(50)}
        for name, text in texts.items():
            store.write_document(
                Document(document_id=name, source=name, content_hash="1"), text, [], recipe="r", references={}
            )
        reading = iter(store.documents())
        next(reading)
        assert store.maintenance.give_back_pages() >= (store.directory / "data.mdb").stat().st_size
        assert sum(1 for _ in reading) == 49
        assert {name: store.text(name) for name in texts} == texts
        store.delete_document("doc-7")
        store.maintenance.give_back_pages()
        assert store.document("doc-7") is None
        assert store.maintenance.verify().ok


def test_a_file_that_is_not_mapped_has_nothing_to_give_back(tmp_path):
    (tmp_path / "data.mdb").write_bytes(b"x" * 4096)
    assert give_back(tmp_path / "data.mdb") == 0
    assert give_back(tmp_path / "none") == 0


# ---- reserve

SCRIPT = """
import os, resource, subprocess, sys
from pathlib import Path
from namespace import enter
from storekit import equal, identity, kv_of
from storekit import write as write_small
from ragkv.errors import StoreFullError
from ragkv.store import Store
from ragkv.store.data_file import Reserve

way, old, folder = sys.argv[1], sys.argv[2] == "old", Path(sys.argv[3])
if way == "tmpfs":
    enter()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "none", folder], check=True)
keep = Reserve.keep

def ids(n):
    return (n,) * 1000  # 64 KB of KV

def write(store, d):
    write_small(store, f"{d}", *(ids(1000 * d + n) for n in range(5)))

def full(store):
    try:
        for d in range(100):
            write(store, d)
    except StoreFullError as error:
        assert "is full" in str(error) and "make room" in str(error)
        return d
    raise AssertionError("never full")

if old:
    Reserve.keep = lambda self, used, end: None
with Store.create(folder / "index", map_size=1 << 20) as store:
    write(store, 0)
    if way == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 20, 5 << 20))
    count = full(store)
    assert count > 2
if way == "tmpfs":
    filler = os.open(folder / "filler", os.O_WRONLY | os.O_CREAT)
    try:
        while os.write(filler, bytes(4096)):
            continue
    except OSError:
        os.close(filler)
    assert os.statvfs(folder).f_bavail == 0
Reserve.keep = keep
with Store.open(folder / "index") as store:
    with store.writing("delete", timeout=0):  # writes its name into a file
        for d in range(1, count - 1):
            assert store.delete_document(f"{d}")
        assert store.maintenance.verify().ok
        store.maintenance.collect(in_use=lambda manifest: True)
    store.put_meta("still", "writable")
with Store.open(folder / "index") as store:
    assert [stored.document.document_id for stored in store.documents()] == sorted(["0", f"{count - 1}"])
    assert all(equal(store.get_kv(of), kv_of(of)) for of in (identity(*ids(n)) for n in range(5)))
    write(store, 7)  # into the pages that are free
    assert store.maintenance.verify().ok
print("ok")
"""


# An old file that already has the size of its quota has no reserved space.
@pytest.mark.parametrize(("way", "age"), [("tmpfs", "new"), ("tmpfs", "old"), ("limit", "new")])
def test_documents_can_be_deleted_from_a_full_disk(way, age, tmp_path):
    if way == "tmpfs" and namespace() is None:
        pytest.skip("no mount namespace to make a small disk in: the quota on file sizes is tried all the same")
    code, out, errors = CliChild(way, age, tmp_path, program=SCRIPT).end()
    assert (code, out) == (0, "ok\n"), errors
