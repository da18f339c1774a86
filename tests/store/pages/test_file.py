"""A data file that LMDB would crash on is refused before it is mapped."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ragkv.errors import CorruptStoreError, StoreError
from ragkv.store import Store
from ragkv.store.pages.file import file_system, read_header, refuse_network

MOUNTS = r"""21 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 21 0:40 / /mnt/team rw shared:9 - nfs4 nas:/team rw
31 21 0:41 / /mnt/with\040space rw - cifs //nas/x rw
32 30 0:42 / /mnt/team/local rw master:3 - tmpfs none rw
33 21 0:43 / /over rw - ext4 /dev/vdb rw
34 21 0:44 / /over rw - fuse.sshfs me@far: rw
"""


@pytest.fixture
def data(store: Store, write: Callable[..., object]) -> Path:
    write(store, "a", tuple(range(100)), tuple(range(200)))
    store.close()
    return store.directory / "data.mdb"


def test_the_file_is_as_long_as_the_map(data: Path) -> None:
    header = read_header(data)
    assert header is not None
    assert header.used < header.map_size == data.stat().st_size


def test_a_file_cut_behind_its_last_page_opens(data: Path) -> None:
    header = read_header(data)
    assert header is not None
    with data.open("r+b") as file:
        file.truncate(header.used)
    with Store.open(data.parent.parent) as opened:
        assert len(list(opened.chunks())) == 2


def test_a_map_that_only_the_meta_page_claims_is_not_made(data: Path) -> None:
    """As much as the address space allows, which the next writer would make the file's length."""
    before = data.stat().st_size
    with data.open("r+b") as file:
        for page in (0, 4096):
            file.seek(page + 32)  # its head, magic, version and address come before
            file.write(struct.pack("=Q", 1 << 46))
    header = read_header(data)
    assert header is not None
    assert header.map_size == before
    with Store.open(data.parent.parent) as opened:
        assert opened.sizes()[1] == before
        opened.put_meta("model", {"name": "other"})
        assert len(list(opened.chunks())) == 2
    assert data.stat().st_size == before


@pytest.mark.parametrize("missing", [1, 4096, 20_000])
def test_a_cut_file_does_not_crash_the_interpreter(data: Path, missing: int) -> None:
    header = read_header(data)
    assert header is not None
    with data.open("r+b") as file:
        file.truncate(header.used - missing)
    script = "import sys; from ragkv.store import Store; list(Store.open(sys.argv[1]).chunks())"
    result = subprocess.run(
        [sys.executable, "-c", script, data.parent.parent], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1, result
    assert "CorruptStoreError" in result.stderr
    assert "cut short" in result.stderr


@pytest.mark.parametrize("garbage", [b"x", bytes(8192), b"\xff" * 100_000], ids=["byte", "zeros", "ones"])
@pytest.mark.parametrize("readonly", [False, True])
def test_garbage_is_refused(data: Path, garbage: bytes, readonly: bool) -> None:
    data.write_bytes(garbage)
    with pytest.raises(CorruptStoreError, match="ingest again"):
        Store.open(data.parent.parent, readonly=readonly)


def test_an_empty_file_is_refused(data: Path) -> None:
    data.write_bytes(b"")
    with pytest.raises(CorruptStoreError, match="empty"):
        Store.open(data.parent.parent)


def test_another_lmdb_version_is_refused(data: Path) -> None:
    with data.open("r+b") as file:
        file.seek(20)
        file.write(b"\2")
    with pytest.raises(StoreError, match="data version 2"):
        Store.open(data.parent.parent)


def test_no_file_is_no_header(tmp_path: Path) -> None:
    assert read_header(tmp_path / "data.mdb") is None


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
    ],
)
def test_file_system_is_that_of_the_nearest_mount(path: str, kind: str) -> None:
    assert file_system(Path(path), MOUNTS) == kind


def test_network_file_systems_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_network(tmp_path)
    for kind in ("nfs4", "fuse.sshfs"):
        monkeypatch.setattr("ragkv.store.pages.file.file_system", lambda *_, kind=kind: kind)
        with pytest.raises(StoreError, match="local disk"):
            refuse_network(tmp_path)
