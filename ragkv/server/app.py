"""The server's app: its routes, and how errors are told."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse

import ragkv
from ragkv.errors import RagkvError
from ragkv.server.crowd import Crowd
from ragkv.server.failure import Refusal, refusal_of
from ragkv.server.jobdesk import JobDesk
from ragkv.server.manage import manage_routes
from ragkv.server.own import own_routes
from ragkv.server.protocol import protocol_routes
from ragkv.server.reply import FAILURES, Condition
from ragkv.server.served import Served
from ragkv.server.webpage import page_routes
from ragkv.server.wire import Json

__all__ = ["make_app"]


def make_app(served: Served, crowd: Crowd, desk: JobDesk, *, footer: bool = False) -> FastAPI:
    """The routes over these indexes. `footer`: answers end with their sources, whether a client asks for it or not.

    Whoever serves the app closes `desk` before the indexes.
    """
    app = FastAPI(title="ragkv", version=ragkv.__version__, docs_url=None, redoc_url=None, responses=FAILURES)
    app.openapi = partial(_described, app.openapi)  # type: ignore[method-assign]
    app.add_exception_handler(Refusal, _told)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RagkvError, _told)
    app.state.ready = False

    @app.get("/healthz", response_model=Condition)
    async def healthz() -> Json:
        """Whether the process lives."""
        return Json({"status": "ok"})

    @app.get("/readyz", response_model=Condition, responses={503: {"model": Condition}})
    async def readyz() -> Json:
        """Whether it answers questions: its models are loaded, and it is not stopping."""
        return Json({"status": "ready" if app.state.ready else "starting"}, 200 if app.state.ready else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        """Prometheus' text format."""
        return PlainTextResponse(crowd.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    app.include_router(protocol_routes(served, crowd, footer=footer))
    app.include_router(own_routes(served, crowd))
    app.include_router(manage_routes(served, desk))
    app.include_router(page_routes())
    return app


def _described(describe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The OpenAPI description, with the key that a server may ask for."""
    told = describe()
    told["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    told["security"] = [{}, {"key": []}]
    return told


async def _told(_: Request, error: Exception) -> Json:
    refusal = refusal_of(error)
    return Json(refusal.body, refusal.status, headers=refusal.headers)


async def _malformed(_: Request, error: Exception) -> Json:
    """A body that is no JSON, or not that of the protocol: the first thing that is wrong with it."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = [str(part) for part in first["loc"][1:]]
    param = ".".join(where) or None
    message = first["msg"] if param is None else f"{param}: {first['msg']}"
    return Json(Refusal(400, message, param=param).body, 400)


async def _http(_: Request, error: Exception) -> Json:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, Refusal):  # the body came too slowly, or was too large
        return await _told(_, error.__cause__)
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    refusal = Refusal(error.status_code, str(error.detail), kind=kind)
    return Json(refusal.body, error.status_code, headers=error.headers)
