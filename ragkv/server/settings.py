"""The server's settings, API keys and port, and limits on the memory that glibc keeps.

Nothing heavy is imported here, so that wrong settings are refused at once and the port is reserved before the models
are loaded.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import hmac
import os
import re
import secrets
import shlex
import socket
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ragkv.errors import ConfigError, UsageError
from ragkv.util.files import open_plain, refusal

_LINE = re.compile(r"([A-Za-z0-9._-]{1,64})\s+sha256:([0-9a-f]{64})")
_KEY_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Keys:
    """The API keys in a file, one per line: `NAME sha256:HASH`, without the keys themselves. `#` begins a comment."""

    def __init__(self, hashes: Mapping[str, str]) -> None:
        self._hashes = dict(hashes)

    @classmethod
    def read(cls, path: Path) -> Keys:
        """Read the file. ConfigError if it is unreadable, writable by others, malformed, or has no key."""
        with _opened(path, os.O_RDONLY) as file:
            hashes = _parsed(path, file.read())
            _refuse_shared(path, file)
        if not hashes:
            raise ConfigError(f"{path} holds no key; make one with --new-key NAME.")
        return cls(hashes)

    def owner(self, key: str) -> str | None:
        """The name of the key's owner, in constant time whether there is one or not."""
        given, owner = _hash(key), None
        for name, known in self._hashes.items():
            if hmac.compare_digest(given, known):
                owner = name
        return owner


def add_key(path: Path, name: str) -> str:
    """Make a key for `name`, add its hash to the file, which only its owner may read, and return the key.

    UsageError for a bad name or one that has a key; ConfigError for a file that `Keys.read` would refuse.
    """
    if not _KEY_NAME.fullmatch(name):
        raise UsageError(f"A key's name has letters, digits, '.', '_' and '-', 64 at most, unlike {name!r}.")
    key = f"rk-{secrets.token_urlsafe(32)}"
    with _opened(path, os.O_RDWR | os.O_APPEND | os.O_CREAT) as file:
        content = file.read()
        if content:
            _refuse_shared(path, file)
        else:
            os.fchmod(file.fileno(), 0o600)
        if name in _parsed(path, content):
            raise UsageError(f"{path} has a key for {name!r} already; delete its line to make a new one.")
        lead = "" if not content or content.endswith(b"\n") else "\n"
        file.write(f"{lead}{name} sha256:{_hash(key)}\n".encode())
    return key


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[IO[bytes]]:
    """Open the file without following links; ConfigError if that fails."""
    try:
        with os.fdopen(open_plain(path, flags, 0o600), "rb" if flags == os.O_RDONLY else "r+b") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"The keys in {path} cannot be read or written: {refusal(error)}.") from error


def _refuse_shared(path: Path, file: IO[bytes]) -> None:
    """ConfigError if other users may write to the file, because they could add keys."""
    if os.fstat(file.fileno()).st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"Other users may write keys into {path}: see whose keys it holds, then chmod 600 {shlex.quote(str(path))}."
        )


def _parsed(path: Path, content: bytes) -> dict[str, str]:
    """The hashes by name; ConfigError for a line that is no key."""
    try:
        lines = content.decode().splitlines()
    except ValueError as error:
        raise ConfigError(f"The keys in {path} cannot be read or written: {refusal(error)}.") from error
    hashes = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise ConfigError(f"{path}, line {number}: a key is NAME sha256:HASH; make one with --new-key NAME.")
        hashes[match[1]] = match[2]
    return hashes


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+")  # RFC 6454; browser extensions have schemes of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """The most bytes of a body, and how many seconds a client may take: to send a request's headers, then its body, and
    to read the response when the buffers are full. File uploads have limits of their own."""

    body_bytes: int = 4 << 20
    head_seconds: float = 15.0
    body_seconds: float = 30.0
    upload_bytes: int = 256 << 20
    upload_seconds: float = 900.0
    unread_seconds: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How a server listens. At most `requests` are answered at a time; a stop waits up to `stop_seconds` for them."""

    host: str = "127.0.0.1"
    port: int = 8080
    keys: Keys | None = None
    origins: tuple[str, ...] = ()
    requests: int = 64
    limits: ServerLimits = field(default_factory=ServerLimits)
    stop_seconds: int = 20
    footer: bool = False
    resident: bool = False
    """Also serve local commands of the same user, through a socket in each index's folder."""
    idle_seconds: int = 0
    """If not 0: listen at that socket only, and end after so long without a question."""

    def __post_init__(self) -> None:
        if self.host not in LOOPBACK and self.keys is None:
            raise UsageError(
                f"Listening on {self.host} lets others ask and read your documents: give --keys FILE, or leave --host "
                "out to serve this machine alone."
            )
        for origin in self.origins:
            if not _ORIGIN.fullmatch(origin):
                raise UsageError(
                    f"--allow-origin takes a page's scheme, host and port, such as https://example.org, not {origin!r}."
                )


def named_places(named: Sequence[str]) -> dict[str, str]:
    """The folders, or packs, of `--index` (`DIR` or `NAME=DIR`) by name, which is the folder's or file's by default.

    UsageError for two of one name, and for a name that does not fit into a model id.
    """
    places: dict[str, str] = {}
    for place in named:
        name, sign, folder = place.partition("=")
        if not sign or not _NAME.fullmatch(name):  # a folder may have "=" in its path
            folder = place
            path = Path(place).resolve()
            stem = path.name if path.is_dir() else path.name.removesuffix(".ragkv")
            name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:64] or "index"
        if name in places:
            raise UsageError(f"Two indexes are called {name!r}; give one another name: --index NAME={folder}.")
        places[name] = folder
    return places


def reserve(host: str, port: int) -> socket.socket:
    """A socket bound to this address that does not listen yet, so that clients are still refused.

    UsageError if the address is not available.
    """
    listening = None
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier server may linger
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind(address)
    except (OSError, OverflowError, UnicodeError) as error:  # an invalid host name is a UnicodeError
        if listening is not None:
            listening.close()
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            message = f"Another program listens on {host} port {port}; stop it, or choose another port with --port."
            raise UsageError(message) from error
        raise UsageError(f"{host} port {port} cannot be listened on: {refusal(error)}.") from error
    return listening


_HEAPS = 2
_MAPPED_FROM = 1 << 20
"""Allocations from this size on are the system's own mappings, which are returned when they are freed."""
# mallopt's numbers, from glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def limit_heaps() -> None:
    """Give all threads of the process few heaps, and large tensors their own mappings; call it early.

    Each answer has a thread. By default glibc gives threads heaps that keep freed memory, and takes ever larger tensors
    from these heaps once one of that size was freed (mallopt(3), M_ARENA_MAX and M_MMAP_THRESHOLD), so a server's
    memory would grow for hours. Does nothing where the C library cannot (macOS, musl), or if the user has set
    `MALLOC_…` variables.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt(_M_ARENA_MAX, _HEAPS)
    mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM)
    mallopt(_M_TRIM_THRESHOLD, 16 * _MAPPED_FROM)


def trim_memory() -> None:
    """Return free pages of all heaps to the system; does nothing on macOS and musl. Takes milliseconds."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
