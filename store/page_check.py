"""Check the whole data file of a store before LMDB follows its pages, and remember which files were checked.

LMDB trusts its file: one flipped bit in a page can kill the process that reads it, or make a writer overwrite live
pages. `lmdb.verify` reads the file in Python, without LMDB, so that a damaged file cannot crash the process. It runs
when this user opens a data file that no process of this user has checked or written (a foreign, copied or restored
index, or one whose writer was killed), and in `ragkv verify`. The stamps of checked files are in the user's state
folder, outside of every index, so that an index cannot bring its own (docs/formats.md, "What is checked when").
"""

from __future__ import annotations

import logging
import os
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import lmdb.verify as lmdb_verify

from ragkv.store.codecs import DamagedError
from ragkv.store.data_file import HEAD_BYTES, damaged_file
from ragkv.store.tables import TABLES, VALUE_BYTES
from ragkv.util.files import key_file, open_plain, read_plain

PageProgress = Callable[[int, int], None]
"""Called with how many pages were checked, and how many the file has."""

logger = logging.getLogger(__name__)

_NODE = struct.Struct("=4H")  # data size or child (low, high), flags, key size
_KEY_LIMIT = 511
_SEVERAL = lmdb_verify.MDB_DUPSORT | lmdb_verify.MDB_DUPFIXED
_SUB_PAGE = 0x72  # the flags of a sub-page of sorted values: P_LEAF, P_LEAF2, P_SUBP and P_DIRTY
_NO_SUBDIR = 0x4000  # how the last writer opened the environment; says nothing about the pages
_PATIENCE = 2.0  # seconds until a check is mentioned
_STEP = 4096  # pages between two reports of progress
_HOLLOW_PAGES, _HOLLOW = 1 << 24, 64
_NOT_A_STORE = (lmdb_verify.VerifyError, struct.error, ArithmeticError, LookupError, ValueError, RecursionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageReport:
    """Counts of a snapshot's pages.

    `live` pages hold something, `free` ones may be written over, and `unaccounted` ones are neither: lost, but
    harmless.
    """

    live: int
    free: int
    unaccounted: int


def check_pages(data: Path, on_progress: PageProgress | None = None) -> PageReport:
    """Check every page of the newest snapshot, and the list of free pages; `CorruptStoreError` for damage.

    Hold a read transaction meanwhile if others may write: then they write over no page of the snapshot. It takes about
    10 µs a row, and two bytes of memory a page.
    """
    try:
        with os.fdopen(open_plain(data), "rb") as file:
            return _StoreVerifier(file, on_progress).report()
    except _NOT_A_STORE as error:
        raise damaged_file(data, f"is damaged ({error})") from error


def free_bytes(data: Path) -> int:
    """Bytes of the pages that the list of free pages names; 0 when it cannot be read."""
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
    """`lmdb.verify`, which stops at the first damage, with some rules of a store's tables that it does not know.

    Besides what `lmdb.verify` checks, nodes lie side by side without gaps, because LMDB moves them by their sizes; keys
    are within what the branch page above says; all leaves are at the same depth; and values of tables with several
    values per key have `VALUE_BYTES`. Three states that LMDB leaves are accepted: a run of pages that is longer than
    its value, a table's count of pages that includes those of values deleted since, and a page that is lost.
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
        """A leaf is at the depth of its tree, of the tree's kind, and begins with `first` where it may."""
        if ctx["depth"] != ctx["db"].depth or bare != (ctx["db"].flags & _SEVERAL == lmdb_verify.MDB_DUPFIXED):
            self.err(f"page {pgno} is a leaf of another tree")
        if ctx["low"] and ctx["key_cmp"](first, ctx["low"]) < 0:
            self.err(f"page {pgno} has keys that belong to another page")

    def _nodes(self, pgno: int, buf: bytes, *, least: int, branch: bool) -> tuple[int, ...]:
        """Where the nodes of a page begin, in the order of their keys: they fill the page without gaps."""
        end, count = self._check_btree_bounds(buf, 0, self.psize, f"page {pgno}")
        found: tuple[int, ...] = struct.unpack_from(f"={count}H", buf, HEAD_BYTES)
        for at in sorted(found):
            if at != end or at + _NODE.size > self.psize:
                self.err(f"page {pgno} has nodes that overlap or leave a gap")
            low, high, flags, size = _NODE.unpack_from(buf, at)
            if size > _KEY_LIMIT or not (size or branch):
                self.err(f"page {pgno} has a key of {size} bytes")
            value = 0 if branch else 8 if flags & lmdb_verify.F_BIGDATA else low | high << 16
            end = at + _NODE.size + size + value + 1 & -2
        if end != self.psize or count < least:
            self.err(f"page {pgno} has too few nodes, or nodes that leave a gap")
        return found

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
    """What this user's processes know of a data file, in a file of the user's state folder.

    It holds the size and the times of the data file after the last check or commit, or the process that is writing.
    Whatever else writes to the data file, copies or replaces it changes the times. While a stamped writer is at work,
    others trust the file; when that writer was killed, or the machine stopped, the next process checks the file again.
    """

    def __init__(self, data: Path) -> None:
        status = data.stat()
        self._data = data
        self._name = f"{status.st_dev:x}-{status.st_ino:x}"
        self._writing = f"writing {os.getpid()} {_boot()}"
        self._warned = False

    def at_rest(self) -> str:
        """The stamp of the file as it is now. Take it before the file is checked."""
        now = self._data.stat()
        return f"checked {now.st_size} {now.st_ctime_ns} {now.st_mtime_ns}"

    def holds(self) -> bool:
        """Whether the file is as a process of this user left it, or such a process is writing to it."""
        found = self._read()
        if found == self.at_rest():
            return True
        kind, _, rest = found.partition(" ")
        pid, _, boot = rest.partition(" ")
        return kind == "writing" and pid.isdigit() and boot == _boot() and Path("/proc", pid).exists()

    def begin(self) -> None:
        """This process is about to write to a file that it trusts. Call it under LMDB's write lock."""
        self.write(self._writing)

    def end(self) -> None:
        """The transaction has ended. When another process has begun one meanwhile, that process ends it."""
        if self._read() == self._writing:
            with suppress(OSError):  # the data file was deleted meanwhile
                self.write(self.at_rest())

    def write(self, stamp: str) -> None:
        """Leave a stamp. When it cannot be written, the next process checks the whole file."""
        try:
            path = self._path()
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = open_plain(path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.pwrite(descriptor, stamp.encode().ljust(_STAMP_BYTES), 0)
            finally:
                os.close(descriptor)
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


def _boot() -> str:
    """Identifies the current boot of the machine."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return "unknown"
