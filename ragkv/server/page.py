"""The web page at `/`: files of the package, with a content policy under which browsers run and load nothing else."""

from __future__ import annotations

import functools
import hashlib
from importlib import resources
from typing import NamedTuple

from fastapi import APIRouter, Request
from starlette.responses import Response

from ragkv.server.errors import ApiError

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
_START = "index.html"


class StaticFile(NamedTuple):
    """A file as it is sent; `tag` changes with its bytes."""

    body: bytes
    media_type: str
    tag: str


def page_routes() -> APIRouter:
    """The page and its files. They hold no document and need no key; the page asks the API, which does."""
    routes = APIRouter(include_in_schema=False)

    @routes.get("/")
    async def page(request: Request) -> Response:
        return _sent(request, _START)

    @routes.get("/page/{name}")
    async def file(name: str, request: Request) -> Response:
        return _sent(request, name)

    return routes


def page_paths() -> frozenset[str]:
    """The paths that the page and its files have."""
    return frozenset({"/", *(f"/page/{name}" for name in _files())})


@functools.cache
def _files() -> dict[str, StaticFile]:
    """Read once, so that no request names a file on the disk."""
    found = {}
    for path in (resources.files("ragkv.server") / "page").iterdir():
        kind = path.name.rpartition(".")[2]
        if kind in _TYPES:
            body = path.read_bytes()
            found[path.name] = StaticFile(body, _TYPES[kind], f'"{hashlib.sha256(body).hexdigest()[:16]}"')
    return found


def _sent(request: Request, name: str) -> Response:
    file = _files().get(name)
    if file is None:
        raise ApiError(404, "The page has no such file.", code="not_found")
    headers = {
        "content-security-policy": _POLICY,
        "cross-origin-opener-policy": "same-origin",
        "cache-control": "no-cache",  # kept, but asked for again: an upgrade shows at once
        "etag": file.tag,
    }
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.body, media_type=file.media_type, headers=headers)
