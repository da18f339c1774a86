"""Files that a client sends as a form, written to the disk while they come (RFC 7578)."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

from fastapi import Request
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import ClientDisconnect

from ragkv.server.failure import Refusal
from ragkv.server.jobfolder import refused

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

__all__ = ["MOST_FILES", "Received", "plain_name", "receive_files"]

MOST_FILES = 64
_LONGEST_NAME = 255
_DRIVE = re.compile(r"[A-Za-z]:")


class Received(NamedTuple):
    """A file as it came: the name that its sender gave it, and where its bytes are."""

    name: str
    path: Path


async def receive_files(request: Request, folder: Path, *, most_bytes: int) -> list[Received]:
    """Write the parts called `files` into `folder`, under numbers: no name that a client gives is that of a file.

    Refusal for a form that is damaged, for more than `MOST_FILES` files, for one of more than `most_bytes`, and for
    names that are paths.
    """
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 0 < len(boundary) <= 200:
        raise Refusal(415, "Send the files as multipart/form-data.", code="unsupported_media_type")
    form = _Form(folder, most_bytes)
    parser = MultipartParser(boundary, form.callbacks())
    try:
        async for piece in request.stream():
            if piece:
                await asyncio.to_thread(parser.write, piece)
    except FormParserError as error:
        raise Refusal(400, "The form is not well-formed multipart/form-data.", param="files") from error
    except ClientDisconnect as error:
        raise Refusal(499, "The client went away.", code="client_closed_request") from error
    except OSError as error:
        raise refused(folder, error) from error
    finally:
        form.close()
    if not form.complete:
        raise Refusal(400, "The form ends early.", param="files")
    if not form.files:
        raise Refusal(400, "The form holds no file; send some as parts called `files`.", param="files")
    return form.files


def plain_name(raw: bytes) -> str:
    """A file's name as a document may have it: relative, and nothing that could be a path elsewhere. Refusal."""
    try:
        name = raw.decode()
    except UnicodeDecodeError as error:
        raise Refusal(400, "A file's name is not UTF-8.", param="files") from error
    strange = not name.isprintable() or "\\" in name or _DRIVE.match(name)
    if strange or len(name) > _LONGEST_NAME or any(part.strip() in ("", ".", "..") for part in name.split("/")):
        said = (
            f"A file may be called `report.pdf` or `notes/report.pdf`, in at most {_LONGEST_NAME} printable "
            f"characters, not {name[:80]!r}."
        )
        raise Refusal(400, said, param="files")
    return name


class _Form:
    """What the parser tells of a form."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.files: list[Received] = []
        self.complete = False
        self._folder = folder
        self._most = most_bytes
        self._left = 0
        self._file: IO[bytes] | None = None
        self._headers: dict[bytes, bytes] = {}
        self._field = self._value = b""

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._in_field,
            "on_header_value": self._in_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._open,
            "on_part_data": self._in_data,
            "on_part_end": self.close,
            "on_end": self._end,
        }

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin(self) -> None:
        self._headers = {}

    def _in_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _in_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._field.lower()] = self._value
        self._field = self._value = b""

    def _open(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        if options.get(b"name") != b"files" or b"filename" not in options:
            raise Refusal(400, "Send each file as a part called `files`, with its name.", param="files")
        if len(self.files) == MOST_FILES:
            raise Refusal(413, f"Send at most {MOST_FILES} files at a time.", param="files", code="too_large")
        name = plain_name(options[b"filename"])
        if any(name == received.name for received in self.files):
            raise Refusal(400, f"Two of the files are called {name!r}.", param="files")
        path = self._folder / str(len(self.files))
        self.files.append(Received(name, path))
        self._left = self._most
        self._file = path.open("xb")

    def _in_data(self, data: bytes, start: int, end: int) -> None:
        self._left -= end - start
        if self._left < 0:
            said = f"{self.files[-1].name!r} has more than {self._most} bytes, the most that the index reads."
            raise Refusal(413, said, param="files", code="too_large")
        assert self._file is not None
        self._file.write(data[start:end])

    def _end(self) -> None:
        self.complete = True
