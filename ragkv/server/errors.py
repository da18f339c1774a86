"""Errors in the format of OpenAI's protocol, `{"error": {message, type, param, code}}`, and JSON responses."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from starlette.responses import JSONResponse

from ragkv.errors import (
    AnswerInterruptedError,
    MissingExtraError,
    ModelServerError,
    PromptTooLongError,
    RagkvError,
    RetrievalError,
    StoreAccessError,
    StoreBusyError,
    StoreFullError,
    StoreGoneError,
    UsageError,
)
from ragkv.util.telemetry import request_id


class ApiError(Exception):
    """The error response to a request: its HTTP status, and the body that the client receives."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self._error = {"message": message, "type": kind, "param": param, "code": code}

    @property
    def body(self) -> dict[str, Any]:
        """The body of the response, with the id of the current task's request."""
        return {"error": {**self._error, "request_id": request_id.get() or None}}


def too_many(message: str, *, seconds: int) -> ApiError:
    """The error of a busy server; the client may try again after `seconds`."""
    headers = {"retry-after": str(seconds)}
    return ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", headers=headers)


def stopping_error() -> ApiError:
    """The error of a server that is stopping."""
    return ApiError(503, "The server is stopping.", kind="server_error", code="unavailable")


_OPTION = re.compile(r"--(no-)?(candidates|engine|max-new-tokens|rerank|retrieval|steps|top-k|where)\b")
"""Names of command-line options that are also fields of requests."""
_PATH = re.compile(r"(?<![^\s'\"(`])/(?:[^'\"`:;,/\n]+/)*([^\s'\"`:;,/]+)")
_REMEDY = re.compile(r";[^;]*(?:\bragkv [a-z]+|--[a-z])[^;]*$")
"""The part of an error that recommends a ragkv command, which the client of a server may not have."""


def readable_error(error: RagkvError, names: Mapping[str, str] = MappingProxyType({})) -> str:
    """The error's message for a client: with its protocol's names of parameters, and without the server's paths.
    `names` maps Python names of parameters to the protocol's, if they differ.
    """

    def parameter(found: re.Match[str]) -> str:
        name = found[2].replace("-", "_")
        name = names.get(name, name)
        return f"{name}: false" if found[1] else name

    if isinstance(error, StoreGoneError):
        return "The index was deleted, moved or replaced while it was open; ask again when it is back."
    message = _OPTION.sub(parameter, str(error).removeprefix("decoding: "))
    if error.param is not None and error.param in names:
        message = re.sub(rf"\b{re.escape(error.param)}\b", names[error.param], message, count=1)
    return _PATH.sub(r"\1", _REMEDY.sub(".", message))


def to_api_error(error: Exception, names: Mapping[str, str] = MappingProxyType({})) -> ApiError:
    """The response to an error. Only ragkv's own errors are shown, which contain neither document text nor the server's
    paths; any other one becomes a general message. `names` is as for `readable_error`.
    """
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, RagkvError):
        return ApiError(500, "The server failed; its log says more.", kind="server_error", code="internal_error")
    message, param = readable_error(error, names), None if error.param is None else names.get(error.param, error.param)
    match error:
        case PromptTooLongError():
            return ApiError(400, message, param=names.get("question", "question"), code="context_length_exceeded")
        case UsageError():
            return ApiError(400, message, param=param)
        case RetrievalError():
            return ApiError(422, message, kind="retrieval_error", param=param, code="nothing_retrieved")
        case AnswerInterruptedError() | ModelServerError() | StoreBusyError() | StoreGoneError():
            return ApiError(503, message, kind="server_error", code="unavailable", headers={"retry-after": "1"})
        case MissingExtraError():  # OpenAI's clients retry on 5xx, unless a header forbids it
            headers = {"x-should-retry": "false"}
            return ApiError(501, message, kind="server_error", param=param, code="missing_extra", headers=headers)
        case StoreAccessError():
            return ApiError(403, message, kind="permission_error", code="read_only")
        case StoreFullError():
            return ApiError(507, message, kind="server_error", code="disk_full")
        case _:
            return ApiError(500, message, kind="server_error")


def log_failure(logger: logging.Logger, what: str, error: Exception, failure: ApiError) -> None:
    """Log an error that became the response `failure`, unless the client is to blame; of one of ours, its traceback."""
    if isinstance(error, ModelServerError):
        logger.warning("%s: %s", what, error)
    elif failure.status >= 500 and not isinstance(error, ApiError):
        logger.error("%s", what, exc_info=error)


def pack_json(body: Any) -> bytes:
    """The value as JSON in UTF-8. A text that is not valid Unicode (a file name may hold any bytes) is escaped."""
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(body, allow_nan=False, separators=(",", ":")).encode()


class Json(JSONResponse):
    """A JSON body that can always be sent."""

    def render(self, content: Any) -> bytes:
        return pack_json(content)


def event(body: Any, name: str | None = None) -> bytes:
    """A server-sent event; without a name, as OpenAI's protocol has them."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + pack_json(body) + b"\n\n"
