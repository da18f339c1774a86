"""Checks of LMDB's data file before it is mapped.

LMDB trusts its file. If the file was cut short, the first touch of a missing page kills the process with SIGBUS; if it
is on a network file system, a second machine corrupts it. Both have to be refused before the map exists.
"""

from __future__ import annotations

import errno
import os
import re
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ragkv.boundary.plainfile import is_folder, require_plain
from ragkv.errors import CorruptStoreError, StoreError
from ragkv.store.seal import DamagedError

__all__ = [
    "FULL",
    "Header",
    "Meta",
    "OpenFile",
    "damaged_file",
    "discard_stub",
    "file_system",
    "read_header",
    "read_meta",
    "refuse_links",
    "refuse_network",
]

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers that say that a file cannot grow."""

_MAGIC = 0xBEEFC0DE
_DATA_VERSION = 1
_META_PAGE = 0x08
# page number, pad, flags; magic, version, map address, map size; the trees of free pages (its record begins with
# the page size) and of tables; last page, transaction
_META = struct.Struct("=8x 2x H 4x IIQQ 48s 48s QQ")
_MAP_LIMIT = 1 << 47  # address space of a process
_LEAST_MAP = 64 << 20
_ID_LIMIT = 1 << 62
_NETWORK = {
    *("afpfs", "afs", "beegfs", "ceph", "cifs", "davfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "orangefs"),
    *("smb3", "smbfs"),
}
_NETWORK_FUSE = re.compile(r"fuse\.(sshfs|ceph|glusterfs|juicefs|rclone|s3fs|gcsfuse|goofys|davfs2?|curlftpfs)")


@dataclass(frozen=True, slots=True)
class Header:
    """The newer of the file's two meta pages, in bytes.

    `used` ends behind the last page. `map_size` is the size that a map of the file should have, which is what the page
    says, unless the file is too short for it.
    """

    map_size: int
    used: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """A meta page, the start of a snapshot. `free` and `main` are LMDB's records of the free pages' tree and of the
    tables' tree."""

    page_size: int
    map_size: int
    last_page: int
    transaction: int
    free: bytes
    main: bytes


class OpenFile:
    """A file that LMDB has mapped: whether it is still there, and still as long as it was.

    Touching a mapped page that the file has lost is SIGBUS, so that the length is checked before each transaction.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()  # absolute, because the process may change its directory
        self._opened = self._path.stat()

    def size(self, least: int | None = None) -> int:
        """Its bytes. `StoreError` when the file was moved or replaced, or is shorter than `least` bytes.

        `least` unset is the length at the time of opening.
        """
        try:
            now = self._path.stat()
        except FileNotFoundError:
            raise StoreError(
                f"{self._path} was moved or deleted while it was open: open the index again where it is now"
            ) from None
        if not os.path.samestat(now, self._opened):
            raise StoreError(f"{self._path} was replaced while it was open: open the index again")
        least = self._opened.st_size if least is None else least
        if now.st_size < least:
            raise StoreError(
                f"{self._path} was cut short while it was open: it should hold at least {least} bytes and holds "
                f"{now.st_size}: restore a backup, or delete the index and ingest again"
            )
        return now.st_size

    def is_cut(self) -> bool:
        """Whether the file that was opened is still there, but shorter than it was."""
        with suppress(OSError):
            now = self._path.stat()
            return os.path.samestat(now, self._opened) and now.st_size < self._opened.st_size
        return False


def read_header(data: Path) -> Header | None:
    """The header of a data file; None when there is no file yet, or an empty one.

    `CorruptStoreError` when LMDB cannot have left the file like this. LMDB itself may leave out free pages at the end
    of its file. But every writer of ragkv first extends the file, sparsely, to the whole map (`Database.write`), so
    that a file that is shorter than its pages was cut.
    """
    if not data.exists() or not data.stat().st_size:
        return None
    with data.open("rb") as file:
        first = _meta(file.read(_META.size), 0, data)
        file.seek(first.page_size)
        second = _meta(file.read(_META.size), 1, data)
        size = file.seek(0, 2)
    if second.page_size != first.page_size:
        raise damaged_file(data, f"has pages of {first.page_size} and of {second.page_size} bytes")
    newest = max(first, second, key=lambda meta: meta.transaction)
    used = (newest.last_page + 1) * newest.page_size
    if size < used:
        raise damaged_file(data, f"was cut short: it should hold at least {used} bytes and holds {size}")
    # A writer extends the file to its map, and a copy needs no map before it is written to. If a page claims a larger
    # map, it was made to exhaust the address space, and the next writer would extend the file to that size.
    return Header(map_size=max(used, min(newest.map_size, max(size, _LEAST_MAP))), used=used)


def discard_stub(data: Path) -> None:
    """Empty a file that holds only a part of LMDB's first two pages, because its creation was killed.

    Call it only to make a store, and with the writer's lock of its directory held.
    """
    if not data.exists():
        return
    with data.open("rb") as file:
        page = file.read(_META.size)
        size = file.seek(0, 2)
    with suppress(DamagedError, _VersionError):
        if size < 2 * _unpack(page, 0).page_size:
            os.truncate(data, 0)


def read_meta(descriptor: int, transaction: int) -> Meta | None:
    """The meta page of a snapshot of an open environment; None when a later transaction has written over it.

    The two meta pages take turns, so that the lowest bit of the transaction's number tells which one it is.
    `DamagedError` when the page makes no sense.
    """
    page_size = _unpack(os.pread(descriptor, _META.size, 0), 0).page_size
    # Read it twice, because a writer may be changing it right now.
    meta, again = (
        _unpack(os.pread(descriptor, _META.size, page_size * (transaction & 1)), transaction & 1) for _ in range(2)
    )
    return meta if meta == again and meta.transaction == transaction else None


def _meta(page: bytes, number: int, data: Path) -> Meta:
    try:
        return _unpack(page, number)
    except DamagedError as error:
        raise damaged_file(data, str(error)) from error
    except _VersionError as error:
        raise StoreError(
            f"{data} has LMDB data version {error}, and ragkv reads version {_DATA_VERSION}: "
            "ingest again into a new index"
        ) from error


def _unpack(page: bytes, number: int) -> Meta:
    """Meta page `number`, 0 or 1. Everything that LMDB believes when it opens the file is checked."""
    if len(page) < _META.size:
        raise DamagedError(f"is too short for an LMDB file ({len(page)} bytes at a meta page)")
    flags, magic, version, _, map_size, free, main, last_page, transaction = _META.unpack(page)
    if magic != _MAGIC or not flags & _META_PAGE:
        raise DamagedError("is not an LMDB file")
    if version != _DATA_VERSION:
        raise _VersionError(version)
    page_size = struct.unpack_from("=I", free)[0]
    if page_size not in {1 << power for power in range(9, 16)}:
        raise DamagedError(f"has pages of {page_size} bytes")
    # A new file has two meta pages of transaction 0; after that they take turns.
    if (transaction & 1 != number and transaction) or transaction >= _ID_LIMIT:
        raise DamagedError(f"has transaction {transaction} on meta page {number}")
    if last_page < 1 or max(map_size, (last_page + 1) * page_size) > _MAP_LIMIT:
        raise DamagedError(f"has a map of {map_size} bytes up to page {last_page}")
    return Meta(
        page_size=page_size, map_size=map_size, last_page=last_page, transaction=transaction, free=free, main=main
    )


class _VersionError(ValueError):
    """The file has another data version of LMDB."""


def damaged_file(data: Path, what: str) -> CorruptStoreError:
    """The error for a data file that cannot be repaired; `what` is the end of "<file> ..."."""
    return CorruptStoreError(f"{data} {what}: restore a backup, or delete the index and ingest again")


def refuse_links(directory: Path, names: Iterable[str]) -> None:
    """`StoreError` when the store's folder, or a file of these names in it, is a link, a pipe or a device.

    LMDB opens its files by name and writes to them, wherever a link leads. Without this check, a store that somebody
    else made could have it write to any of the user's files.
    """
    if os.path.lexists(directory) and not is_folder(directory):
        raise StoreError(f"{directory} is not a folder itself: put the store there, not a link to it")
    for name in names:
        try:
            require_plain(directory / name)
        except OSError as error:
            raise StoreError(
                f"{directory / name} cannot be used ({error.strerror}): put the file itself there, or restore a backup"
            ) from error


def refuse_network(directory: Path) -> None:
    """`StoreError` for NFS, SMB and the like: LMDB's locks and its map work on one machine only."""
    mounts = Path("/proc/self/mountinfo")
    kind = file_system(directory, mounts.read_text()) if mounts.exists() else None
    if kind is not None and (kind in _NETWORK or _NETWORK_FUSE.fullmatch(kind)):
        raise StoreError(f"{directory} is on a network file system ({kind}): put the index on a local disk")


def file_system(directory: Path, mountinfo: str) -> str | None:
    """The type of the file system that holds `directory`, from Linux's mountinfo; None when no mount does."""
    kinds: dict[Path, str] = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), left.split()[4])
        kinds[Path(point)] = right.split()[0]  # a later mount hides an earlier one
    path = directory.resolve()
    return next((kinds[place] for place in (path, *path.parents) if place in kinds), None)
