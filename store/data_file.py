"""LMDB's files at the level of the system: checks before they are mapped, reserved disk space, and releasing memory.

LMDB trusts its file. If the file was cut short, the first access to a missing page kills the process with SIGBUS; on a
network file system, a second machine corrupts it. Both are refused before the file is mapped. One flipped bit in a page
can kill the process that reads it too, or make a writer overwrite live pages. So `lmdb.verify` reads the whole file in
Python, without LMDB, when this user opens one that no process of this user has checked or written (a foreign, copied or
restored index, or one whose writer was killed), and in `ragkv verify`. The stamps of checked files are in the user's
state folder, outside of every index, so that an index cannot bring its own (docs/formats.md, "What is checked when").

LMDB writes a changed page to a new place before it frees the old one, so even deleting needs space. The reserve is in
`data.mdb` itself, behind the last page: blocks that the file system has allocated to the file. A transaction that adds
data must leave it (`Database.write` with a `need`); one that deletes may use it. No file is created or removed for it,
so a crash leaves nothing half done.

A page that was read stays mapped until the system needs its memory, so a process that walks a large store seems to hold
all of it. Released pages stay in the page cache, and the next access maps them again.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import shutil
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import lmdb.verify as lmdb_verify

from ragkv.errors import CorruptStoreError, StoreError, StoreGoneError
from ragkv.store.codecs import DamagedError
from ragkv.store.tables import TABLES, VALUE_BYTES
from ragkv.util.files import FULL, closing_descriptor, is_folder, key_file, open_plain, read_plain, require_plain

logger = logging.getLogger(__name__)

HEAD_BYTES = 16
"""Bytes of the head of a page of LMDB."""

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

    `used` ends behind the last page. `map_size` is the size that a map of the file should have: the page's value,
    unless the file is too short for it.
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
    """A file that LMDB has mapped; checks that it still exists and has not been cut.

    Touching a mapped page that the file has lost raises SIGBUS, so the length is checked before each transaction.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()  # absolute, because the process may change its directory
        self._opened = self._path.stat()

    def size(self, least: int | None = None) -> int:
        """Its bytes. `StoreGoneError` if the file was moved or replaced, `StoreError` if it is shorter than `least`
        bytes.

        The default of `least` is the length when it was opened.
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
        """Whether the opened file is still there, but has become shorter."""
        with suppress(OSError):
            now = self._path.stat()
            return os.path.samestat(now, self._opened) and now.st_size < self._opened.st_size
        return False


def read_header(data: Path) -> Header | None:
    """The header of a data file; None when there is no file yet, or an empty one.

    `CorruptStoreError` if LMDB cannot have left the file in this state. LMDB itself may leave out free pages at the end
    of its file, but every writer of ragkv first extends the file, sparsely, to the whole map (`Database.write`), so a
    file that is shorter than its pages was cut.
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
    """`StoreError` if the store's folder, or a file of these names in it, is a link, a pipe or a device.

    LMDB opens its files by name and writes to them, wherever a link leads. Without this check, a foreign store could
    make it write to any of the user's files.
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
    kind = file_system(directory, os.fsdecode(mounts.read_bytes())) if mounts.exists() else None
    if kind is not None and (kind in _NETWORK or _NETWORK_FUSE.fullmatch(kind)):
        raise StoreError(f"{directory} is on a network file system ({kind}): put the index on a local disk")


def file_system(directory: Path, mountinfo: str) -> str | None:
    """The type of the file system that holds `directory`, from Linux's mountinfo; None when no mount does."""
    kinds: dict[Path, str] = {}
    for line in mountinfo.split("\n")[:-1]:  # not `splitlines`: a mount's name may hold what it takes for a line's end
        left, _, right = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), left.split(" ")[4])
        kinds[Path(point)] = right.split(" ")[0]  # a later mount hides an earlier one
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

        Does nothing if the file system cannot allocate blocks in advance.
        """
        if end <= self._end:
            return
        with closing_descriptor(os.open(self._data, os.O_RDWR)) as descriptor:
            _allocate(descriptor, used, end - used)
        self._end = end


def _allocate(descriptor: int, start: int, size: int) -> None:
    """Allocate blocks, where the system (macOS does not) and the file system can; `OSError` when there are none."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, start, size)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise


def allocate_lock(lock: Path) -> None:
    """Allocate blocks for LMDB's lock table: LMDB writes it through a map, where a full disk raises SIGBUS.

    `OSError` of `FULL` if there are none. A file that may not be written is left to LMDB.
    """
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o664)
    except OSError as error:
        if error.errno in FULL:
            raise
        return
    try:
        status = os.fstat(descriptor)
        _allocate(descriptor, 0, max(_PAGE, status.st_size))
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
    """Bytes of mapped files in this process's memory, libraries included; 0 where the system does not report it."""
    with suppress(OSError, ValueError):
        for line in _STATUS.read_text(encoding="ascii").splitlines():
            if line.startswith("RssFile:"):
                return int(line.split()[1]) * 1024
    return 0


def give_back(file: Path) -> int:
    """Unmap the resident pages of a file that is mapped read-only; returns the bytes of its maps, 0 if impossible.

    Other threads may read the map at the same time: they only wait for the pages that they touch.
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


PageProgress = Callable[[int, int], None]
"""Called with the number of checked pages and of all pages."""

_NODE = struct.Struct("=4H")  # data size or child (low, high), flags, key size
_KEY_LIMIT = 511
_SEVERAL = lmdb_verify.MDB_DUPSORT | lmdb_verify.MDB_DUPFIXED
_SUB_PAGE = 0x72  # the flags of a sub-page of sorted values: P_LEAF, P_LEAF2, P_SUBP and P_DIRTY
_NO_SUBDIR = 0x4000  # an option of the last writer, which concerns no page
_PATIENCE = 2.0  # seconds until a check is mentioned
_STEP = 4096  # pages between two reports of progress
_HOLLOW_PAGES, _HOLLOW = 1 << 24, 64
_NOT_A_STORE = (lmdb_verify.VerifyError, struct.error, ArithmeticError, LookupError, ValueError, RecursionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageReport:
    """Counts of a snapshot's pages.

    `live` pages hold data, `free` ones may be overwritten, and `unaccounted` ones are neither: lost, but harmless.
    """

    live: int
    free: int
    unaccounted: int


def check_pages(data: Path, on_progress: PageProgress | None = None) -> PageReport:
    """Check every page of the newest snapshot, and the list of free pages; `CorruptStoreError` for damage.

    Hold a read transaction meanwhile if others may write, so that they overwrite no page of the snapshot. It takes
    about 10 µs a row, and two bytes of memory a page.
    """
    try:
        with os.fdopen(open_plain(data), "rb") as file:
            return _StoreVerifier(file, on_progress).report()
    except _NOT_A_STORE as error:
        raise damaged_file(data, f"is damaged ({error})") from error


def free_bytes(data: Path) -> int:
    """Bytes of the pages in the list of free pages; 0 if it cannot be read."""
    with suppress(*_NOT_A_STORE), os.fdopen(open_plain(data), "rb") as file:
        return _StoreVerifier(file, None).free_bytes()
    return 0


def log_progress(data: Path) -> PageProgress:
    """Logs once, if the check of a file takes seconds, what the process is waiting for."""
    began, logged = time.monotonic(), False

    def notify(done: int, total: int) -> None:
        nonlocal logged
        if not logged and time.monotonic() - began > _PATIENCE:
            logger.warning(
                "checking the %d pages of %s before they are first used (%.0f %%)", total, data, 100 * done / total
            )
            logged = True

    return notify


class _StoreVerifier(lmdb_verify._Verifier):  # type: ignore[misc]
    """`lmdb.verify`, which stops at the first damage, plus rules for a store's tables that it does not check.

    Nodes must be adjacent without gaps, because LMDB moves them by their sizes; keys must be in the range that the
    branch page above states; all leaves must be at the same depth; and values of tables with several values per key
    must have `VALUE_BYTES`. Three states that LMDB leaves are accepted: a run of pages that is longer than its value, a
    table's count of pages that includes those of values deleted since, and a lost page.
    """

    def __init__(self, file: BinaryIO, on_progress: PageProgress | None) -> None:
        super().__init__(file, os.fstat(file.fileno()).st_size)
        self._on_progress = on_progress
        self._marked = 0

    def report(self) -> PageReport:
        self.verify()
        live, free = sum(self.live), sum(self.free)
        return PageReport(live=live, free=free, unaccounted=self.next_pgno - lmdb_verify.NUM_METAS - live - free)

    def free_bytes(self) -> int:
        self.detect_engine()
        self.load_metas()
        self.live, self.free = bytearray(self.next_pgno), bytearray(self.next_pgno)
        self._verify_tree("freeDB", self.meta.free, lmdb_verify._cmp_int, None, is_free=True)
        for transaction, pages in self.free_records:
            self._decode_idl(transaction, pages)
        return sum(self.free) * int(self.psize)

    def err(self, msg: str) -> None:
        raise DamagedError(msg)

    def load_metas(self) -> None:
        super().load_metas()
        blocks = os.fstat(self.f.fileno()).st_blocks * 512
        if self.next_pgno > _HOLLOW_PAGES and self.next_pgno * self.psize > _HOLLOW * blocks:
            self.err("nearly all of its pages are holes")

    def _mark_live(self, pgno: int, what: str) -> Any:
        self._marked += 1
        if self._on_progress is not None and self._marked % _STEP == 0:
            self._on_progress(self._marked, self.next_pgno)
        return super()._mark_live(pgno, what)

    def _verify_tree(self, name: str, db: Any, key_cmp: Any, dup_cmp: Any, is_free: bool) -> Any:
        table = name.removeprefix("main/")
        if is_free:
            expected = lmdb_verify.MDB_INTEGERKEY | db.flags & _NO_SUBDIR
        elif name == "main" or (name != table and table in TABLES):
            expected = _SEVERAL if name != table and TABLES[table] else 0
        else:
            expected = db.flags
        if db.flags != expected:
            self.err(f"the table {table!r} has flags {db.flags:#x} instead of {expected:#x}")
        return super()._verify_tree(name, db, key_cmp, dup_cmp, is_free)

    def _check_counts(self, name: str, db: Any, ctx: Any) -> None:
        if db.flags & lmdb_verify.MDB_DUPSORT:
            db.branch_pages, db.leaf_pages = ctx["branch"], ctx["leaf"]
        super()._check_counts(name, db, ctx)

    def _check_cover(self) -> None:
        both = int.from_bytes(self.live, "little") & int.from_bytes(self.free, "little")
        if both:
            self.err(f"page {((both & -both).bit_length() - 1) // 8} is both in use and in the list of free pages")

    def _walk_page(self, ctx: Any, pgno: int, depth: int) -> None:
        low = ctx.setdefault("lows", {}).pop(pgno, b"")
        if low and ctx["last_key"] is not None and ctx["key_cmp"](low, ctx["last_key"]) <= 0:
            self.err(f"page {pgno} follows keys that belong to it")
        ctx["low"], ctx["depth"] = low, depth
        super()._walk_page(ctx, pgno, depth)

    def _walk_branch(self, ctx: Any, pgno: int, buf: bytes, depth: int) -> None:
        low = ctx["low"]
        for at in self._nodes(pgno, buf, least=1 if ctx["is_free"] else 2, branch=True):
            first, second, third, size = _NODE.unpack_from(buf, at)
            ctx["lows"][first | second << 16 | third << 32] = low or buf[at + 8 : at + 8 + size]
            low = b""
        super()._walk_branch(ctx, pgno, buf, depth)

    def _walk_leaf(self, ctx: Any, pgno: int, buf: bytes) -> None:
        at = self._nodes(pgno, buf, least=1, branch=False)[0]
        self._require_leaf(ctx, pgno, buf[at + 8 : at + 8 + _NODE.unpack_from(buf, at)[3]], bare=False)
        super()._walk_leaf(ctx, pgno, buf)

    def _walk_leaf2(self, ctx: Any, pgno: int, buf: bytes) -> None:
        self._require_values(pgno, buf, 0, self.psize)
        self._require_leaf(ctx, pgno, buf[self.hdrsz : self.hdrsz + VALUE_BYTES], bare=True)
        super()._walk_leaf2(ctx, pgno, buf)

    def _require_leaf(self, ctx: Any, pgno: int, first: bytes, *, bare: bool) -> None:
        """Require a leaf at the depth and of the kind of its tree, beginning with `first` if that is known."""
        if ctx["depth"] != ctx["db"].depth or bare != (ctx["db"].flags & _SEVERAL == lmdb_verify.MDB_DUPFIXED):
            self.err(f"page {pgno} is a leaf of another tree")
        if ctx["low"] and ctx["key_cmp"](first, ctx["low"]) < 0:
            self.err(f"page {pgno} has keys that belong to another page")

    def _nodes(self, pgno: int, buf: bytes, *, least: int, branch: bool) -> tuple[int, ...]:
        """The offsets of a page's nodes in key order; they must fill the page without gaps."""
        end, count = self._check_btree_bounds(buf, 0, self.psize, f"page {pgno}")
        offsets: tuple[int, ...] = struct.unpack_from(f"={count}H", buf, HEAD_BYTES)
        for offset in sorted(offsets):
            if offset != end or offset + _NODE.size > self.psize:
                self.err(f"page {pgno} has nodes that overlap or leave a gap")
            low, high, flags, size = _NODE.unpack_from(buf, offset)
            if size > _KEY_LIMIT or not (size or branch):
                self.err(f"page {pgno} has a key of {size} bytes")
            value = 0 if branch else 8 if flags & lmdb_verify.F_BIGDATA else low | high << 16
            end = offset + _NODE.size + size + value + 1 & -2
        if end != self.psize or count < least:
            self.err(f"page {pgno} has too few nodes, or nodes that leave a gap")
        return offsets

    def _require_values(self, pgno: int, buf: bytes, base: int, size: int) -> None:
        """The head of a page or sub-page of sorted values: LMDB counts 2 bytes of each value in `lower`, the rest of
        its bytes in `upper`."""
        lower, count = self._pg_lower(buf, base), self._numkeys(self._pg_lower(buf, base))
        right = self._pg_pad(buf, base) == VALUE_BYTES and count > 0 and lower % 2 == 0
        if (
            not right
            or self._pg_upper(buf, base) != size - count * (VALUE_BYTES - 2)
            or self._pg_upper(buf, base) < lower
        ):
            self.err(f"page {pgno} has sorted values with a wrong head")

    def _walk_subpage(self, ctx: Any, pgno: int, i: int, buf: bytes, doff: int, dsize: int) -> Any:
        if dsize < HEAD_BYTES or self._pg_flags(buf, doff) != _SUB_PAGE:
            self.err(f"page {pgno} has a damaged sub-page")
        self._require_values(pgno, buf, doff, dsize)
        return super()._walk_subpage(ctx, pgno, i, buf, doff, dsize)

    def _leaf_value(
        self, ctx: Any, pgno: int, i: int, buf: bytes, o: int, nflags: int, ksize: int, dsize: int, key: bytes
    ) -> None:
        if ctx["db"].flags & lmdb_verify.MDB_DUPSORT:
            right = nflags in (4, 6) or (not nflags and dsize == VALUE_BYTES)
        else:
            right = nflags in (0, 1) or (nflags == lmdb_verify.F_SUBDATA and ctx["name"] == "main")
        most = ((self.psize - HEAD_BYTES) // 2 & -2) - 2  # of a node whose value is not in pages of its own
        if not right or (not nflags & 1 and _NODE.size + ksize + dsize > most):
            self.err(f"page {pgno} has a node of a wrong size or kind")
        super()._leaf_value(ctx, pgno, i, buf, o, nflags, ksize, dsize, key)

    def _bigdata(self, ctx: Any, pgno: int, i: int, buf: bytes, doff: int, dsize: int, want_bytes: bool) -> Any:
        """A value in pages of its own. LMDB leaves more pages than it needs when it writes a value twice in one
        transaction, as it does with lists of free pages; the head of the first page says how many there are."""
        whole = dsize
        if doff + 8 <= self.psize:
            head = self._read_at(min(struct.unpack_from("=Q", buf, doff)[0], self.next_pgno) * self.psize, HEAD_BYTES)
            if len(head) == HEAD_BYTES:
                whole = max(dsize, self._pg_pages(head, 0) * self.psize - HEAD_BYTES)
        value = super()._bigdata(ctx, pgno, i, buf, doff, whole, want_bytes)
        return None if value is None else value[:dsize]

    def _validate_dup_subdb(self, name: str, pgno: int, i: int, subdb: Any) -> None:
        if (subdb.pad, subdb.flags) != (VALUE_BYTES, lmdb_verify.MDB_DUPFIXED) or not subdb.entries:
            self.err(f"page {pgno} has a wrong tree of values")
        super()._validate_dup_subdb(name, pgno, i, subdb)


_STAMP_BYTES = 128


class TrustStamp:
    """A file in the user's state folder that records which state of a data file this user's processes trust.

    It holds the size and the times of the data file after the last check or commit, or the process that is writing.
    Anything else that writes to, copies or replaces the data file changes the times. While a stamped writer is at work,
    others trust the file; if that writer was killed, or the machine stopped, the next process checks the file again.
    """

    def __init__(self, data: Path) -> None:
        status = data.stat()
        self._data = data
        self._name = f"{status.st_dev:x}-{status.st_ino:x}"
        self._writing = _writer(str(os.getpid()))
        self._warned = False

    def at_rest(self) -> str:
        """The stamp of the file's current state. Take it before the file is checked."""
        now = self._data.stat()
        return f"checked {now.st_size} {now.st_ctime_ns} {now.st_mtime_ns}"

    def holds(self) -> bool:
        """Whether the file is unchanged since a process of this user left it, or such a process is writing to it."""
        stamp = self._read()
        if stamp == self.at_rest():
            return True
        pid = stamp.removeprefix("writing ").partition(" ")[0]
        return pid.isdigit() and stamp == _writer(pid) and " ended " not in stamp

    def begin(self) -> None:
        """Record that this process is about to write to a file that it trusts. Call it under LMDB's write lock."""
        self.write(self._writing)

    def end(self) -> None:
        """Record the end of the transaction, unless another process has begun one meanwhile, which will do so."""
        if self._read() == self._writing:
            with suppress(OSError):  # the data file was deleted meanwhile
                self.write(self.at_rest())

    def write(self, stamp: str) -> None:
        """Write a stamp. If that fails, the next process checks the whole file."""
        try:
            path = self._path()
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with closing_descriptor(open_plain(path, os.O_WRONLY | os.O_CREAT, 0o600)) as descriptor:
                os.pwrite(descriptor, stamp.encode().ljust(_STAMP_BYTES), 0)
        except (OSError, RuntimeError) as error:
            if not self._warned:
                logger.info(
                    "that %s was checked cannot be noted (%s), so that every process checks it: let XDG_STATE_HOME "
                    "name a folder that you may write to",
                    self._data,
                    error,
                )
            self._warned = True

    def _read(self) -> str:
        with suppress(OSError, RuntimeError, UnicodeDecodeError):
            return read_plain(self._path(), limit=_STAMP_BYTES).decode().rstrip()
        return ""

    def _path(self) -> Path:
        return key_file().with_name("checked") / self._name


def _writer(pid: str) -> str:
    """The stamp of a process that is writing. Its start distinguishes it from a later process with the same number,
    which in a container is the rule."""
    began = "ended"  # also where the system does not say
    with suppress(OSError):
        state, *facts = Path("/proc", pid, "stat").read_text(errors="replace").rpartition(")")[2].split()
        began = began if state == "Z" else facts[18]
    return f"writing {pid} {began} {_boot()}"


def _boot() -> str:
    """Identifies the current boot of the machine."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return "unknown"
