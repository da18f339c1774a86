"""What can be known of LMDB's data file before it is mapped.

LMDB trusts its file: one that was cut short kills the process with SIGBUS at the first touch of a missing
page, and one on a network file system is corrupted by the second machine. Both have to be refused before the
map exists.
"""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from ragkv.errors import CorruptStoreError, StoreError

__all__ = ["Header", "discard_stub", "file_system", "read_header", "refuse_network"]

_MAGIC = 0xBEEFC0DE
_DATA_VERSION = 1
_PAGE_HEAD = 16
# magic, version, map address, map size; two databases (the first begins with the page size);
# last page, transaction
_META = struct.Struct("=IIQQ 48s 48s QQ")
_PAGE_SIZES = {1 << power for power in range(9, 17)}
_NETWORK = {
    *("afpfs", "afs", "beegfs", "ceph", "cifs", "davfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "orangefs"),
    *("smb3", "smbfs"),
}
_NETWORK_FUSE = re.compile(r"fuse\.(sshfs|ceph|glusterfs|juicefs|rclone|s3fs|gcsfuse|goofys|davfs2?|curlftpfs)")


@dataclass(frozen=True, slots=True)
class Header:
    """The newer of the file's two meta pages, in bytes."""

    map_size: int
    used: int


def read_header(data: Path) -> Header | None:
    """None when there is no file yet, or nothing in it; `CorruptStoreError` when it cannot be what LMDB left
    behind.

    Every writer of ragkv extends the file to the whole map first (sparse, `Database.write`), so that a file
    shorter than its pages can only have been cut; without that, LMDB itself may leave out free pages at the
    end.
    """
    if not data.exists() or not data.stat().st_size:
        return None
    with data.open("rb") as file:
        first = file.read(_PAGE_HEAD + _META.size)
        newest = _meta(first, data)
        page_size = struct.unpack_from("=I", newest[4])[0]
        if page_size not in _PAGE_SIZES:
            raise _damaged(data, f"has pages of {page_size} bytes")
        file.seek(page_size)
        newest = max(newest, _meta(file.read(_PAGE_HEAD + _META.size), data), key=lambda meta: meta[7])
        used = (newest[6] + 1) * page_size
        size = file.seek(0, 2)
    if size < used:
        raise _damaged(data, f"was cut short: it should hold at least {used} bytes and holds {size}")
    return Header(map_size=newest[3], used=used)


def discard_stub(data: Path) -> None:
    """Empty a file of which only a part of LMDB's two first pages was written: its creation was killed.

    Call it only with the lock of the store's directory, when a store is to be made.
    """
    if not data.exists():
        return
    with data.open("rb") as file:
        page = file.read(_PAGE_HEAD + _META.size)
        size = file.seek(0, 2)
    if len(page) == _PAGE_HEAD + _META.size:
        meta = _META.unpack_from(page, _PAGE_HEAD)
        page_size = struct.unpack_from("=I", meta[4])[0]
        if meta[0] == _MAGIC and page_size in _PAGE_SIZES and size < 2 * page_size:
            os.truncate(data, 0)


def _meta(page: bytes, data: Path) -> tuple[int, int, int, int, bytes, bytes, int, int]:
    if len(page) < _PAGE_HEAD + _META.size:
        raise _damaged(data, f"is too short for an LMDB file ({len(page)} bytes at a meta page)")
    meta = _META.unpack_from(page, _PAGE_HEAD)
    if meta[0] != _MAGIC:
        raise _damaged(data, "is not an LMDB file")
    if meta[1] != _DATA_VERSION:
        raise StoreError(
            f"{data} has LMDB data version {meta[1]}, and ragkv reads version {_DATA_VERSION}: "
            "ingest again into a new index"
        )
    return meta


def _damaged(data: Path, what: str) -> CorruptStoreError:
    return CorruptStoreError(f"{data} {what}: restore a backup, or delete the index and ingest again")


def refuse_network(directory: Path) -> None:
    """`StoreError` for NFS, SMB and their like: LMDB's locks and its map work on one machine only."""
    mounts = Path("/proc/self/mountinfo")
    kind = file_system(directory, mounts.read_text()) if mounts.exists() else None
    if kind is not None and (kind in _NETWORK or _NETWORK_FUSE.fullmatch(kind)):
        raise StoreError(f"{directory} is on a network file system ({kind}): put the index on a local disk")


def file_system(directory: Path, mountinfo: str) -> str | None:
    """The type of the file system that holds `directory`, by Linux's mountinfo; None when no mount does."""
    kinds: dict[Path, str] = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), left.split()[4])
        kinds[Path(point)] = right.split()[0]  # a later mount hides an earlier one
    path = directory.resolve()
    return next((kinds[place] for place in (path, *path.parents) if place in kinds), None)
