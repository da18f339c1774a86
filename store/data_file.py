"""LMDB's files as the system sees them: checks before they are mapped, reserved disk space, and memory to give back.

LMDB trusts its file. If the file was cut short, the first access to a missing page kills the process with SIGBUS; on a
network file system, a second machine corrupts it. Both are refused before the file is mapped.

LMDB writes a changed page to a new place before it frees the old one, so even deleting needs space. The reserve is in
`data.mdb` itself, behind the last page: blocks that the file system has given to the file. A transaction that adds data
must leave it (`Database.write` with a `need`); one that deletes may use it. No file is created or removed for it, so a
crash leaves nothing half done.

A page that was read stays mapped until the system needs its memory, so a process that walks a large store seems to hold
all of it. Pages that are given back stay in the system's cache, and the next access maps them again.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ragkv.errors import CorruptStoreError, StoreError, StoreGoneError
from ragkv.store.codecs import DamagedError
from ragkv.util.files import is_folder, require_plain

HEAD_BYTES = 16
"""Bytes of the head of a page of LMDB."""

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
    """A meta page, the start of a snapshot."""

    page_size: int
    map_size: int
    last_page: int
    transaction: int


class OpenFile:
    """A file that LMDB has mapped: whether it is still there, and still as long as it was.

    Touching a mapped page that the file has lost is SIGBUS, so that the length is checked before each transaction.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()  # absolute, because the process may change its directory
        self._opened = self._path.stat()

    def size(self, least: int | None = None) -> int:
        """Its bytes. `StoreGoneError` when the file was moved or replaced, `StoreError` when it is shorter than
        `least` bytes.

        `least` unset is the length at the time of opening.
        """
        try:
            now = self._path.stat()
        except FileNotFoundError:
            raise StoreGoneError(
                f"{self._path} was moved or deleted while it was open: open the index again where it is now"
            ) from None
        if not os.path.samestat(now, self._opened):
            raise StoreGoneError(f"{self._path} was replaced while it was open: open the index again")
        least = self._opened.st_size if least is None else least
        if now.st_size < least:
            raise StoreError(
                f"{self._path} was cut short while it was open: it should hold at least {least} bytes and holds "
                f"{now.st_size}: restore a backup, or delete the index and ingest again"
            )
        return now.st_size

    @property
    def in_place(self) -> bool:
        """Whether the file that was opened is still the one at its path."""
        try:
            return os.path.samestat(self._path.stat(), self._opened)
        except OSError:
            return False

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
    flags, magic, version, _, map_size, free, _, last_page, transaction = _META.unpack(page)
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
    return Meta(page_size=page_size, map_size=map_size, last_page=last_page, transaction=transaction)


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


_MIB = 1 << 20
_LEAST, _MOST = _MIB // 2, 64 * _MIB
_PAGE = 4096
_CANNOT = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV})


def reserve_bytes(used: int) -> int:
    """How many bytes are kept free behind `used` bytes of pages.

    A deletion rewrites leaves, branches and lists of free pages. That is a few per cent of a store, because the bytes
    of KV are on pages of their own.
    """
    return min(max(used // 8, _LEAST), _MOST)


class Reserve:
    """The reserve of one data file, as this process knows it. Use it under LMDB's write lock."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._end = 0  # the file has blocks up to here, and keeps them

    def wanted(self, used: int, need: int) -> int:
        """The offset up to which blocks are needed for a transaction that writes about `need` bytes behind `used`.

        Blocks for `need` itself are only included when the disk is nearly full, so that files do not grow needlessly.
        """
        end = used + reserve_bytes(used)
        if need and shutil.disk_usage(self._data).free < 2 * need + reserve_bytes(used):
            end += need
        return end

    def keep(self, used: int, end: int) -> None:
        """Allocate blocks from `used` to `end`; `OSError` of `FULL` when there are none.

        Does nothing where the file system cannot allocate blocks in advance.
        """
        if end <= self._end:
            return
        descriptor = os.open(self._data, os.O_RDWR)
        try:
            os.posix_fallocate(descriptor, used, end - used)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
        finally:
            os.close(descriptor)
        self._end = end


def allocate_lock(lock: Path) -> None:
    """Allocate blocks for LMDB's lock table: LMDB writes it through a map, where a full disk is SIGBUS.

    `OSError` of `FULL` when there are none. A file that may not be written is left to LMDB.
    """
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o664)
    except OSError as error:
        if error.errno in FULL:
            raise
        return
    try:
        status = os.fstat(descriptor)
        os.posix_fallocate(descriptor, 0, max(_PAGE, status.st_size))
    except OSError as error:
        # If an old table was never allocated in full, its first page is enough for all but unusually many readers.
        if error.errno in FULL and status.st_blocks * 512 < _PAGE:
            raise
    finally:
        os.close(descriptor)


_DONTNEED = 4
_STATUS = Path("/proc/self/status")
_MAPS = Path("/proc/self/maps")


def mapped_bytes() -> int:
    """Bytes of files that are in this process's memory, libraries too; 0 where the system does not tell."""
    with suppress(OSError, ValueError):
        for line in _STATUS.read_text(encoding="ascii").splitlines():
            if line.startswith("RssFile:"):
                return int(line.split()[1]) * 1024
    return 0


def give_back(file: Path) -> int:
    """Unmap the resident pages of a file that is mapped read-only; the bytes of its maps, 0 if that is not possible.

    Other threads may read the map meanwhile: they only wait for the pages that they touch.
    """
    done = 0
    with suppress(OSError, ValueError, AttributeError):
        inode = file.stat().st_ino
        libc = ctypes.CDLL(None, use_errno=True)
        for line in _MAPS.read_bytes().splitlines():
            area, rights, _, _, number, *name = line.split(None, 5)
            if int(number) != inode or not name or os.fsencode(file.name) not in name[0] or b"w" in rights:
                continue
            start, end = (int(part, 16) for part in area.split(b"-"))
            if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DONTNEED) == 0:
                done += end - start
    return done
