"""The socket in an index's folder, at which a server answers the command line over HTTP, and the client for it.

Commands import this module, so it loads neither a model nor a web framework: the server has the models. If there is no
server, or its settings would give another answer, `UnservedError` is raised before anything happens, and the command
does the work itself.

The socket is in `INDEX/resident/`, which only its owner may enter. Both sides check who owns what they find, because
an index may come from anyone. Only the process that holds the lock beside the socket creates and removes it: a second
server leaves it alone, and a client removes what a killed server left behind.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import ragkv
from ragkv import errors
from ragkv.errors import RagkvError
from ragkv.types import Answer
from ragkv.util.files import closing_descriptor

if TYPE_CHECKING:
    from http.client import HTTPConnection, HTTPResponse

    from ragkv.index.answer import AnswerStream
    from ragkv.pipeline import RagKV


def identity() -> str:
    """Identifies ragkv's version and installation, which server and client must share to answer alike."""
    return f"{ragkv.__version__} in {Path(ragkv.__file__).parent}"


def question_warnings(rag: RagKV | None, stream: AnswerStream) -> list[str]:
    """Warnings before an answer: the engine's, and with an index, once, what mini does not know.

    Loads the model; KVMismatchError if it is not the one that the index was made with.
    """
    from ragkv.index.ingestion import question_note

    notes: list[str | None] = []
    if rag is not None:
        rag.index.require_same_model()
        notes.append(question_note(rag.config, rag.store))
    return [message for message in (*notes, stream.warning) if message]


FOLDER = "resident"
_SOCKET, _LOCK = "socket", "lock"
_MAX_PATH_BYTES = 100
"""The longest socket path in bytes that every system accepts; Linux reaches longer ones through /proc."""
_PEER = struct.Struct("3i")
_ENTER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_HELD = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class LocalSocket:
    """A server's socket: it listens until `close`."""

    def __init__(self, folder: int, listening: socket.socket, held: ExitStack) -> None:
        self._folder = folder
        self.listening = listening
        self._held = held

    @classmethod
    def make(cls, index: Path) -> LocalSocket:
        """Listen in the folder of this index, replacing the socket of a killed server.

        `BlockingIOError` if another server listens there; `OSError` if the folder cannot be written, belongs to another
        user, or is on a file system without sockets.
        """
        with suppress(FileExistsError):
            (index / FOLDER).mkdir(0o700)
        with ExitStack() as stack:
            folder = stack.enter_context(closing_descriptor(os.open(index / FOLDER, _ENTER)))
            if os.fstat(folder).st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, "it belongs to another user", str(index / FOLDER))
            os.fchmod(folder, 0o700)
            lock = os.open(_LOCK, _HELD | os.O_CREAT, 0o600, dir_fd=folder)
            stack.enter_context(closing_descriptor(lock))
            _hold(lock)
            return cls(folder, _listen(index, folder), stack.pop_all())

    def is_in(self, index: Path) -> bool:
        """Whether this index is the one that the socket was made in, which may have been moved and replaced."""
        try:
            return os.path.samestat(os.fstat(self._folder), (index / FOLDER).lstat())
        except OSError:
            return False

    def close(self) -> None:
        """Stop listening: remove the socket, then release the lock."""
        with suppress(OSError):  # the index is gone, or may not be written any more
            os.unlink(_SOCKET, dir_fd=self._folder)
        self.listening.close()
        self._held.close()


def connect(index: Path, *, seconds: float) -> socket.socket | None:
    """A connection to the index's server of the same user; None if there is none.

    A dead socket is removed. Connecting takes at most `seconds`.
    """
    try:
        with _private(index) as folder:
            found = os.lstat(_SOCKET, dir_fd=folder)
            if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
                return None
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.settimeout(seconds)
                connection.connect(_address(index, folder))
                if peer_uid(connection)[1] == os.geteuid():
                    return connection
            except ConnectionRefusedError:
                _remove_stale(folder)
            except OSError:
                connection.close()
                raise
            connection.close()
            return None
    except OSError:
        return None


def is_free(index: Path) -> bool:
    """Whether no server holds the index's socket."""
    try:
        with _private(index) as folder, closing_descriptor(os.open(_LOCK, _HELD, dir_fd=folder)) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def peer_uid(connection: socket.socket) -> tuple[int | None, int]:
    """The process and user of the client. Where the system does not report them, the folder's permissions protect the
    socket.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return None, os.geteuid()
    pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


@contextmanager
def _private(index: Path) -> Iterator[int]:
    """A descriptor of the folder; `OSError` unless this user owns it and no other user may enter it."""
    with closing_descriptor(os.open(index / FOLDER, _ENTER)) as folder:
        found = os.fstat(folder)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(errno.EPERM, "it is not private to this user", str(index / FOLDER))
        yield folder


def _address(index: Path, folder: int) -> str:
    """A path of the socket that is short enough; for a long path it goes through the folder's descriptor."""
    short = Path("/proc/self/fd", str(folder))
    if short.is_dir():
        return str(short / _SOCKET)
    path = str(index.absolute() / FOLDER / _SOCKET)
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise OSError(errno.ENAMETOOLONG, "the path is too long for a socket", path)
    return path


def _listen(index: Path, folder: int) -> socket.socket:
    with suppress(FileNotFoundError):
        os.unlink(_SOCKET, dir_fd=folder)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(_address(index, folder))
        os.chmod(_SOCKET, 0o600, dir_fd=folder)
        listening.listen(64)
    except BaseException:
        listening.close()
        raise
    return listening


def _hold(lock: int, *, tries: int = 40) -> None:
    """Take the lock, which clients hold only briefly; `BlockingIOError` if a server has it."""
    for left in range(tries - 1, -1, -1):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not left:
                raise
            time.sleep(0.025)


def _remove_stale(folder: int) -> None:
    """Remove the socket that refused, unless a server is about to replace it."""
    with suppress(OSError), closing_descriptor(os.open(_LOCK, _HELD, dir_fd=folder)) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(_SOCKET, dir_fd=folder)


ANSWER_SECONDS = 15.0
"""A server that has not begun to respond by then is stopped or overloaded, and the command does its own work."""
SILENT_SECONDS = 120.0
"""The longest pause in a response; a server sends a comment every 5 seconds."""
Events: TypeAlias = Generator[tuple[str, Any]]
"""Server-sent events: names and data."""


class UnservedError(Exception):
    """No server can run the command."""


def query_body(question: str, options: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The body of a query, from the options of `RagKV.stream`."""
    given = {name: value for name, value in options.items() if name != "decoding"}
    return {"question": question, **given, **options.get("decoding", {}), **more}


class LocalClient:
    """A client of an index's server, if there is one.

    `opened` has the settings that the server must have opened the index with (`device`, `batch_tokens`, `max_rows`);
    None for any.
    """

    def __init__(self, index: Path, opened: Mapping[str, Any] | None = None) -> None:
        self._index = index
        self._opened = opened

    def query(self, body: Mapping[str, Any], notify: Callable[[str], None], identifier: str = "") -> ServerReply:
        """The answer to a question, which has started; `notify` receives its warnings."""
        identifier = identifier or secrets.token_hex(8)
        asked = self._ask("POST", "/api/indexes/_/query", {**body, "stream": True}, identifier=identifier)
        events = self._events(*asked)
        next(events)  # from here on, closing them closes the connection
        return ServerReply(events, notify, lambda: self.cancel(identifier))

    def check(self, body: Mapping[str, Any]) -> tuple[str, list[str]]:
        """Check a question's settings: the engine that would answer it, and the warnings before its answer."""
        found = self._json("POST", "/api/indexes/_/query/check", body)
        return found["engine"], found["warnings"]

    def search(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The chunks that a question would be answered from, best first."""
        return list(self._json("POST", "/api/indexes/_/search", body, seconds=SILENT_SECONDS)["chunks"])

    def engines(self) -> list[str]:
        """The names of all engines."""
        models = [model["id"] for model in self._json("GET", "/v1/models?engines=true")["data"]]
        return list(dict.fromkeys(model.partition(":")[2] for model in models if ":" in model))

    def cancel(self, identifier: str) -> None:
        """End an answer at its next token."""
        with suppress(UnservedError, RagkvError):  # it has ended meanwhile
            self._json("DELETE", f"/local/answers/{identifier}")

    def stop(self) -> dict[str, Any]:
        """Stop the server; returns its process, its indexes, and the seconds that it may take."""
        return dict(self._json("DELETE", "/local/server"))

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None, *, seconds: float = 0) -> Any:
        connection, response = self._ask(method, path, body, seconds=seconds)
        with closing(connection), closing(response):
            return json.loads(self._read(response.read))

    def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, identifier: str = "", seconds: float = 0
    ) -> tuple[HTTPConnection, HTTPResponse]:
        connected = connect(self._index, seconds=ANSWER_SECONDS)
        if connected is None:
            raise UnservedError
        from http.client import HTTPConnection, HTTPException

        connection = HTTPConnection("localhost")
        connection.sock = connected
        expected = json.dumps({"identity": identity(), "opened": self._opened, "id": identifier})
        headers = {"Ragkv-Expects": expected, "Content-Type": "application/json", "Connection": "close"}
        try:
            connected.settimeout(seconds or ANSWER_SECONDS)
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            connected.settimeout(SILENT_SECONDS)
            failed = None if response.status in (200, 202) else json.loads(response.read())
        except (OSError, HTTPException, ValueError):
            connection.close()
            raise UnservedError from None
        if failed is None:
            return connection, response
        connection.close()
        if "exception" not in failed:
            raise UnservedError
        raise self._error(failed)

    def _events(self, connection: HTTPConnection, response: HTTPResponse) -> Events:
        name = ""
        with closing(connection), closing(response):
            yield name, None
            while (line := self._read(response.readline)).endswith(b"\n"):
                field, _, value = line[:-1].partition(b": ")
                if field == b"event":
                    name = value.decode()
                elif field == b"data":
                    if name == "error":
                        raise self._error(json.loads(value))
                    yield name, json.loads(value)
        raise self._lost()

    def _read(self, read: Callable[[], bytes]) -> bytes:
        """What `read` returns; a RagkvError if the server is silent or gone."""
        from http.client import HTTPException

        try:
            return read()
        except TimeoutError:
            raise RagkvError(f"The server for {self._index} is silent; see its log, or stop it.") from None
        except (OSError, HTTPException):
            raise self._lost() from None

    def _error(self, body: Mapping[str, Any]) -> RagkvError:
        """The server's error, with the index's path as the user gave it."""
        if "exception" not in body:
            return RagkvError(body["error"]["message"])
        cause = body["exception"]
        kind = getattr(errors, cause["kind"], RagkvError)
        folder, message = Path(cause["folder"]), cause["message"]
        if folder.is_absolute():
            message = message.replace(str(folder), str(self._index))
        error: RagkvError = kind(message)
        return error

    def _lost(self) -> RagkvError:
        return RagkvError(
            f"The server for {self._index} ended before its work was done; ask again, and the command works by itself."
        )


class ServerReply:
    """An answer from a server, used like an `AnswerStream`: iterate over the text, then read `answer`."""

    def __init__(self, events: Events, notify: Callable[[str], None], cancel: Callable[[], None]) -> None:
        self._events = events
        self._notify = notify
        self._answer: Answer | None = None
        self.cancel = cancel
        """Ends the answer at its next token."""

    def close(self) -> None:
        """Close the connection, which ends the answer."""
        self._events.close()

    def __iter__(self) -> Iterator[str]:
        for name, data in self._events:
            if name == "warnings":
                for message in data["warnings"]:
                    self._notify(message)
            elif name == "token":
                yield data["text"]
            elif name == "done":
                sources = [{key: value for key, value in each.items() if key != "url"} for each in data["sources"]]
                self._answer = Answer.from_json({**data, "sources": sources})
                return

    @property
    def answer(self) -> Answer:
        """The finished answer, or the partial one of a cancelled answer."""
        while self._answer is None:
            for _ in self:
                continue
        return self._answer
