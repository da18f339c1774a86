"""What a server is told: its indexes, where it listens, what it bears. Nothing heavy is imported here, so that what is
wrong is refused at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ragkv.errors import UsageError
from ragkv.server.key import Keys

__all__ = ["Limits", "ServerSettings", "named_folders"]

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most bytes of a body, and how many seconds a client may take: to send a request's headers, then its body, and
    to take in what it was sent when the buffers are full. An upload of files has limits of its own."""

    body_bytes: int = 4 << 20
    head_seconds: float = 15.0
    body_seconds: float = 30.0
    upload_bytes: int = 256 << 20
    upload_seconds: float = 900.0
    unread_seconds: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How a server listens. `requests` are answered at a time; a stop waits for them at most `stop_seconds`."""

    host: str = "127.0.0.1"
    port: int = 8080
    keys: Keys | None = None
    origins: tuple[str, ...] = ()
    requests: int = 64
    limits: Limits = field(default_factory=Limits)
    stop_seconds: int = 20
    footer: bool = False
    resident: bool = False
    """Answer the commands of the user who runs it, too, through a socket in each index's folder."""

    def __post_init__(self) -> None:
        if self.host not in LOOPBACK and self.keys is None:
            raise UsageError(
                f"Listening on {self.host} lets others ask and read your documents: give --keys FILE, or leave --host "
                "out to serve this machine alone."
            )


def named_folders(given: Sequence[str]) -> dict[str, Path]:
    """The folders of `--index`, `DIR` or `NAME=DIR`, by name; without a name it is that of the folder.

    UsageError for two of one name, and for a name that does not fit into a model id.
    """
    found: dict[str, Path] = {}
    for each in given:
        name, sign, folder = each.partition("=")
        if not sign or not _NAME.fullmatch(name):  # a folder may have "=" in its path
            folder = each
            name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(each).resolve().name).strip("-._") or "index"
        if name in found:
            raise UsageError(f"Two indexes are called {name!r}; give one another name: --index NAME={folder}.")
        found[name[:64]] = Path(folder)
    return found
