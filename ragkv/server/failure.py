"""Errors as OpenAI's protocol tells them: {"error": {message, type, param, code}}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ragkv.errors import (
    AnswerInterruptedError,
    PromptTooLongError,
    RagkvError,
    RetrievalError,
    StoreAccessError,
    StoreBusyError,
    StoreFullError,
    UsageError,
)

__all__ = ["Refusal", "refusal_of"]


class Refusal(Exception):  # noqa: N818 - what a client is told, not always an error
    """A request that is not answered: the HTTP status, and what the client is told."""

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
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refusal_of(error: Exception) -> Refusal:
    """What a client is told of an error. Only deliberate ones say what happened; they never hold document text."""
    match error:
        case Refusal():
            return error
        case PromptTooLongError():
            return Refusal(400, str(error), code="context_length_exceeded")
        case UsageError():
            return Refusal(400, str(error))
        case RetrievalError():
            return Refusal(422, str(error), kind="retrieval_error", code="nothing_retrieved")
        case AnswerInterruptedError() | StoreBusyError():
            return Refusal(503, str(error), kind="server_error", code="unavailable", headers={"retry-after": "1"})
        case StoreAccessError():
            return Refusal(403, str(error), kind="permission_error", code="read_only")
        case StoreFullError():
            return Refusal(507, str(error), kind="server_error", code="disk_full")
        case RagkvError():
            return Refusal(500, str(error), kind="server_error")
        case _:
            return Refusal(500, "The server failed; its log says more.", kind="server_error", code="internal_error")
