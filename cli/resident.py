"""Have a server that is up for an index do a command's work: what it says is what the command would have said itself.

Nothing heavy is imported here: the models are loaded on the other side. Where there is no server, or one that would not
answer alike, `UnservedError` is raised before anything was done, and the command does its own work.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, TypeAlias

from ragkv import errors
from ragkv.boundary.doorway import knock
from ragkv.errors import RagkvError
from ragkv.server.errand import Question, Talk, Tell, Turn, identity
from ragkv.types import Answer

__all__ = ["Lodger", "Reply", "UnservedError", "alone"]

ANSWER_SECONDS = 15.0
"""A server that has not begun to respond by then is stopped, or hopelessly busy: the command works by itself."""
SILENT_SECONDS = 120.0
"""A server says every 5 seconds that it lives."""


Events: TypeAlias = Generator[dict[str, Any]]


class UnservedError(Exception):
    """No server does this."""


def alone(no_server: bool) -> bool:
    """Whether a command shall work by itself: it was told to, or `--debug` shall show what happens."""
    return no_server or logging.getLogger().isEnabledFor(logging.DEBUG)


class Lodger:
    """An index with a server, as far as one can tell before asking.

    `opened` is what the server must have opened it with: `device`, `batch_tokens`, `max_rows`; None: that is no matter.
    """

    def __init__(self, index: Path, opened: Mapping[str, Any] | None = None) -> None:
        self._index = index
        self._opened = opened

    def query(self, asked: Question, tell: Tell) -> Reply:
        """The answer to a question, begun."""
        return self._reply("query", tell, asked=asdict(asked))

    def begin(self, talk: Talk, engine: str | None, tell: Tell) -> str:
        """As `errand.begin`."""
        return str(self.done("begin", tell, talk=asdict(talk), engine=engine))

    def choose(self, talk: Talk, engine: str, tell: Tell) -> str:
        """As `errand.choose`."""
        return str(self.done("choose", tell, talk=asdict(talk), engine=engine))

    def engines(self) -> list[str]:
        """The names of all engines."""
        return list(self.done("engines"))

    def reply(self, talk: Talk, turn: Turn) -> Reply:
        """The answer to a conversation's next question, begun."""
        return self._reply("reply", lambda said: None, talk=asdict(talk), turn=asdict(turn))

    def page(self, where: list[str], *, after: str, limit: int | None) -> dict[str, Any]:
        """As `errand.list_page`. Names are not given: relative paths are those of this process."""
        return dict(self.done("list", names=[], where=where, after=after, limit=limit))

    def done(self, errand: str, tell: Tell = lambda said: None, **given: Any) -> Any:
        """What comes of an errand that is no answer."""
        for event in self.events(errand, given):
            if "note" in event:
                tell(event["note"])
            if "done" in event:
                return event["done"]
        raise self._lost()

    def events(self, errand: str, given: dict[str, Any]) -> Events:
        """The events of an errand; its error is raised. `UnservedError` before the first."""
        connection, response = self._ask(errand, given)
        return self._told(connection, response)

    def _ask(self, errand: str, given: dict[str, Any]) -> tuple[HTTPConnection, HTTPResponse]:
        found = knock(self._index, seconds=ANSWER_SECONDS)
        if found is None:
            raise UnservedError
        connection = HTTPConnection("localhost")
        connection.sock = found
        try:
            body = json.dumps({"identity": identity(), "opened": self._opened, "given": given})
            connection.request("POST", f"/{errand}", body, {"Content-Type": "application/json", "Connection": "close"})
            response = connection.getresponse()
            if response.status != 200:
                raise UnservedError
        except (OSError, HTTPException, UnservedError):
            connection.close()
            raise UnservedError from None
        found.settimeout(SILENT_SECONDS)
        return connection, response

    def _told(self, connection: HTTPConnection, response: HTTPResponse) -> Events:
        with closing(connection), closing(response):
            while line := self._line(response):
                event: dict[str, Any] = json.loads(line)
                if "declined" in event:
                    raise UnservedError
                if "error" in event:
                    raise self._error(event["error"])
                yield event
        raise self._lost()

    def _line(self, response: HTTPResponse) -> bytes:
        """The next line with an event; nothing when the server is gone."""
        try:
            while (line := response.readline()) == b"\n":
                continue
        except TimeoutError:
            raise RagkvError(f"The server for {self._index} is silent; see its log, or stop it.") from None
        except (OSError, HTTPException):
            return b""
        return line if line.endswith(b"\n") else b""

    def _error(self, told: Mapping[str, str]) -> RagkvError:
        """The server's error as this process would have found it: of the index as its user names it."""
        kind = getattr(errors, told["kind"], RagkvError)
        folder, message = Path(told["folder"]), told["message"]
        if folder.is_absolute():
            message = message.replace(str(folder), str(self._index))
        error: RagkvError = kind(message)
        return error

    def _lost(self) -> RagkvError:
        return RagkvError(
            f"The server for {self._index} ended before its work was done; ask again, and the command works by itself."
        )

    def _reply(self, errand: str, tell: Tell, **given: Any) -> Reply:
        identifier = secrets.token_hex(8)

        def cancel() -> None:
            with suppress(UnservedError, RagkvError):  # it has ended meanwhile
                self.done("cancel", id=identifier)

        events = self.events(errand, {"id": identifier, **given})
        next(events)  # `begun`: from here on the server answers
        return Reply(events, tell, cancel)


class Reply:
    """An answer that a server gives: iterate over its pieces, then read `answer`, as of an `AnswerStream`."""

    def __init__(self, events: Events, tell: Tell, cancel: Callable[[], None]) -> None:
        self._events = events
        self._tell = tell
        self._answer: Answer | None = None
        self.cancel = cancel
        """End it at its next token."""

    def close(self) -> None:
        """Hang up, which ends the answer."""
        self._events.close()

    def __iter__(self) -> Iterator[str]:
        while (piece := self._next()) is not None:
            yield piece

    @property
    def answer(self) -> Answer:
        """The finished answer, or the one so far of an answer that was cancelled."""
        while self._answer is None:
            self._next()
        return self._answer

    def _next(self) -> str | None:
        """The next piece of text; None at the end."""
        if self._answer is not None:
            return None
        for event in self._events:
            if "note" in event:
                self._tell(event["note"])
            elif "piece" in event:
                return str(event["piece"])
            elif "done" in event:
                self._answer = Answer.from_json(event["done"])
                return None
        return None  # not reached: the events end with an error otherwise
