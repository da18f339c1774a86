"""The socket in an index's folder, at which a server answers the command line over HTTP, and the client for it.

Commands import this module, so it loads neither a model nor a web framework: the server has the models. If there is no
server, or its settings would give another answer, `UnservedError` is raised before anything happens, and the command
does the work itself.

The socket is in `INDEX/resident/`. Both sides use that folder only if it belongs to their user and no other may enter
it, because an index may come from anyone. The process that holds the lock beside the socket is the server.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ragkv
from ragkv import errors
from ragkv.errors import RagkvError
from ragkv.types import Answer
from ragkv.util.files import closing_descriptor

if TYPE_CHECKING:
    from http.client import HTTPResponse

    from ragkv.index.answer import AnswerStream
    from ragkv.pipeline import RagKV


@cache
def identity() -> str:
    """Identifies ragkv's version and installation, as they were at the first call: server and client must share them to
    answer alike.
    """
    parts = map(find_spec, ("ragkv", *(f"ragkv.{part}" for part in ("cli", "ingest", "retrievers", "store"))))
    folders = {Path(folder) for spec in parts if spec for folder in spec.submodule_search_locations or ()}
    newest = max(file.stat().st_mtime_ns for folder in folders for file in folder.rglob("*.py"))
    return f"{ragkv.__version__} in {Path(ragkv.__file__).parent}, changed at {newest}"


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
_ENTER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCKED = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class LocalSocket:
    """A server's socket, which is its own until `close`."""

    def __init__(self, folder: int, listening: socket.socket, held: ExitStack) -> None:
        self._folder = folder
        self.listening = listening
        self._held = held

    @classmethod
    def make(cls, index: Path) -> LocalSocket:
        """A socket in the folder of this index, in place of a killed server's; it refuses clients until it listens.

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
            lock = os.open(_LOCK, _LOCKED | os.O_CREAT, 0o600, dir_fd=folder)
            stack.enter_context(closing_descriptor(lock))
            _hold(lock)
            os.pwrite(lock, b"%-20d" % os.getpid(), 0)
            with suppress(FileNotFoundError):
                os.unlink(_SOCKET, dir_fd=folder)
            listening = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listening.bind(_address(index, folder))
            return cls(folder, listening, stack.pop_all())

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
        self._held.close()


def connect(index: Path, *, seconds: float) -> socket.socket | None:
    """A connection to the index's server of the same user, within `seconds`; None if there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _private(index) as folder:
            connection.settimeout(seconds)
            connection.connect(_address(index, folder))
            return connection
    except OSError:
        connection.close()
        return None


def is_listening(index: Path) -> bool:
    """Whether a server of this user accepts connections for the index: one that is loading its model does not yet."""
    connection = connect(index, seconds=ANSWER_SECONDS)
    if connection is not None:
        connection.close()
    return connection is not None


def server_process(index: Path) -> int | None:
    """The process that holds the index's socket; None if there is none."""
    try:
        with _private(index) as folder, closing_descriptor(os.open(_LOCK, _LOCKED, dir_fd=folder)) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(os.pread(lock, 20, 0) or b"0")
    except OSError:
        pass
    return None


def first_time(index: Path) -> bool:
    """Whether this was never asked for the index, which is noted in its folder; `OSError` if that cannot be written."""
    with suppress(FileExistsError):
        (index / FOLDER).mkdir(0o700)
    with _private(index) as folder, suppress(FileExistsError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with closing_descriptor(os.open("told", flags, 0o600, dir_fd=folder)):
            return True
    return False


@contextmanager
def _private(index: Path) -> Iterator[int]:
    """A descriptor of the folder; `OSError` unless this user owns it and no other user may enter it."""
    with closing_descriptor(os.open(index / FOLDER, _ENTER)) as folder:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(errno.EPERM, "it is not private to this user", str(index / FOLDER))
        yield folder


def _address(index: Path, folder: int) -> str:
    """A path of the socket: on Linux through the folder's descriptor, because an address has at most 108 bytes."""
    short = Path("/proc/self/fd", str(folder))
    return str((short if short.is_dir() else index.absolute() / FOLDER) / _SOCKET)


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


ANSWER_SECONDS = 15.0
"""A server that has not begun to respond by then is stopped or overloaded, and the command does its own work."""
SILENT_SECONDS = 120.0
"""The longest pause in a response; a server sends a comment every 5 seconds."""


class UnservedError(Exception):
    """No server can run the command."""


def query_body(question: str, options: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The body of a query, from the options of `RagKV.stream`."""
    own = {name: value for name, value in options.items() if name != "decoding"}
    return {"question": question, **own, **options.get("decoding", {}), **more}


class LocalClient:
    """A client of an index's server, if there is one.

    `opened` has the settings that the server must have opened the index with (`device`, `batch_tokens`,
    `max_sequences`); None for any.
    """

    def __init__(self, index: Path, opened: Mapping[str, Any] | None = None) -> None:
        self._index = index
        self._opened = opened

    def query(self, body: Mapping[str, Any], notify: Callable[[str], None], identifier: str = "") -> ServerReply:
        """The answer to a question, which has started; `notify` receives its warnings."""
        identifier = identifier or secrets.token_hex(8)
        response = self._ask("POST", "/api/indexes/_/query", {**body, "stream": True}, identifier=identifier)
        return ServerReply(self, response, notify, identifier)

    def check(self, body: Mapping[str, Any]) -> tuple[str, list[str]]:
        """Check a question's settings: the engine that would answer it, and the warnings before its answer."""
        result = self._json("POST", "/api/indexes/_/query/check", body)
        return result["engine"], result["warnings"]

    def search(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The chunks that a question would be answered from, best first."""
        return list(self._json("POST", "/api/indexes/_/search", body, seconds=SILENT_SECONDS)["chunks"])

    def cancel(self, identifier: str) -> None:
        """End an answer at its next token."""
        with suppress(UnservedError, RagkvError):  # it has ended meanwhile
            self._json("DELETE", f"/local/answers/{identifier}")

    def stop(self, *, idle: bool = False) -> dict[str, Any]:
        """Stop the server; returns its process, its indexes, and the seconds that it may take.

        `idle`: only if it was left behind by a question; else UnservedError.
        """
        return dict(self._json("DELETE", "/local/idle" if idle else "/local/server"))

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None, *, seconds: float = 0) -> Any:
        with closing(self._ask(method, path, body, seconds=seconds)) as response:
            return json.loads(self.read(response.read))

    def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, identifier: str = "", seconds: float = 0
    ) -> HTTPResponse:
        connected = connect(self._index, seconds=ANSWER_SECONDS)
        if connected is None:
            raise UnservedError
        from http.client import HTTPConnection, HTTPException

        connection = HTTPConnection("localhost")
        connection.sock = connected
        expected = json.dumps({"identity": identity(), "opened": self._opened, "id": identifier})
        headers = {"Ragkv-Expects": expected, "Content-Type": "application/json", "Connection": "close"}
        with closing(connection):  # the response keeps the socket
            try:
                connected.settimeout(seconds or ANSWER_SECONDS)
                connection.request(method, path, None if body is None else json.dumps(body), headers)
                response = connection.getresponse()
                connected.settimeout(SILENT_SECONDS)
                if response.status in (200, 202):
                    return response
                with closing(response):
                    failed = json.loads(response.read())
            except (OSError, HTTPException, ValueError):
                raise UnservedError from None
        if "exception" not in failed:
            raise UnservedError
        raise self.error(failed)

    def read(self, read: Callable[[], bytes]) -> bytes:
        """What `read` returns; a RagkvError if the server is silent or gone."""
        from http.client import HTTPException

        try:
            return read()
        except TimeoutError:
            raise RagkvError(f"The server for {self._index} is silent; see its log, or stop it.") from None
        except (OSError, HTTPException):
            raise self.lost() from None

    def error(self, body: Mapping[str, Any]) -> RagkvError:
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

    def lost(self) -> RagkvError:
        """The error for a server that ends under way."""
        return RagkvError(
            f"The server for {self._index} ended before its work was done; ask again, and the command works by itself."
        )


class ServerReply:
    """An answer from a server, used like an `AnswerStream`: iterate over the text, then read `answer`."""

    def __init__(
        self, client: LocalClient, response: HTTPResponse, notify: Callable[[str], None], identifier: str
    ) -> None:
        self._client = client
        self._response = response
        self._notify = notify
        self._identifier = identifier
        self._answer: Answer | None = None
        self._deltas = self._run()

    def cancel(self) -> None:
        """End the answer at its next token."""
        self._client.cancel(self._identifier)

    def close(self) -> None:
        """Close the connection, which ends the answer."""
        self._response.close()

    def __iter__(self) -> Iterator[str]:
        return self._deltas

    @property
    def answer(self) -> Answer:
        """The finished answer, or the partial one of a cancelled answer."""
        for _ in self._deltas:
            continue
        assert self._answer is not None
        return self._answer

    def _run(self) -> Iterator[str]:
        name = ""
        while (line := self._client.read(self._response.readline)).endswith(b"\n"):
            field, _, value = line[:-1].partition(b": ")
            if field == b"event":
                name = value.decode()
            data = json.loads(value) if field == b"data" else None
            if data is None:
                continue
            if name == "error":
                raise self._client.error(data)
            if name == "warnings":
                for message in data["warnings"]:
                    self._notify(message)
            elif name == "token":
                yield data["text"]
            elif name == "done":
                sources = [{key: value for key, value in each.items() if key != "url"} for each in data["sources"]]
                self._answer = Answer.from_json({**data, "sources": sources})
                return
        raise self._client.lost()
