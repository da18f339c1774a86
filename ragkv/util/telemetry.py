"""What operators see of a running process: OpenTelemetry spans, request ids, and log lines as JSON.

Spans go to the process's provider (`export_spans` makes one from the OTEL_… variables); if nothing has imported
opentelemetry there is none, and nothing is recorded. Spans and log lines contain counts, names of models and engines,
and times: never the text of a question, an answer or a document.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import IO, Any

from ragkv.errors import install_hint

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the request that the current task or thread serves."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,127}")
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

logger = logging.getLogger(__name__)


def take_request_id(given: str | None) -> str:
    """Set and return `request_id`: the client's, if it has 1 to 128 letters, digits and `._:/+=@-`; else a new one."""
    found = given if given is not None and _ID.fullmatch(given) else uuid.uuid4().hex
    request_id.set(found)
    return found


class Span:
    """A span that has begun, or nothing if spans are not recorded. `started` is a time of `time.perf_counter`.

    Its parent is the current span, or the one named by a request's headers. End it once, in any thread.
    """

    def __init__(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        *,
        started: float | None = None,
        headers: Mapping[str, str] | None = None,
        off: bool = False,
    ) -> None:
        api = None if off else sys.modules.get("opentelemetry.trace")
        self._span: Any = None
        self.records = False
        """Whether attributes and children are kept."""
        if api is None:
            return
        context, kind = None, api.SpanKind.INTERNAL
        if headers is not None:
            from opentelemetry.propagate import extract

            context, kind = extract(headers), api.SpanKind.SERVER
        self._offset = time.time_ns() - time.perf_counter_ns()  # one for both ends of the span
        start = self._epoch(started)
        self._span = api.get_tracer("ragkv").start_span(name, context, kind, attributes=attributes, start_time=start)
        self.records = self._span.is_recording()

    def note(self, attributes: Mapping[str, Any], name: str = "") -> None:
        """Set attributes, and rename the span if `name` is given."""
        if self.records:
            self._span.set_attributes(attributes)
            if name:
                self._span.update_name(name)

    def end(self, error: BaseException | str | None = None, *, ended: float | None = None) -> None:
        """End it. After an error it records the error's class only, as the message may quote the question."""
        if self._span is None:
            return
        if error is not None:
            from opentelemetry.trace import StatusCode

            self._span.set_attribute("error.type", error if isinstance(error, str) else type(error).__name__)
            self._span.set_status(StatusCode.ERROR)
        self._span.end(self._epoch(ended))

    def _epoch(self, clock: float | None) -> int:
        """A time of `time.perf_counter`, by default now, as nanoseconds since 1970."""
        return self._offset + (time.perf_counter_ns() if clock is None else int(clock * 1e9))

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make it the parent of spans that begin in the block, in this thread or task; the block does not end it."""
        if self._span is None:
            yield
            return
        from opentelemetry.trace import use_span

        with use_span(self._span, record_exception=False, set_status_on_exception=False):
            yield


@contextmanager
def span(name: str, attributes: Mapping[str, Any] | None = None) -> Iterator[Span]:
    """A span around the block, current in it."""
    around = Span(name, attributes)
    try:
        with around.current():
            yield around
    except BaseException as error:
        around.end(error)
        raise
    around.end()


def note_span(attributes: Mapping[str, Any]) -> None:
    """Set attributes of the current span."""
    if (api := sys.modules.get("opentelemetry.trace")) is not None:
        api.get_current_span().set_attributes(attributes)


def export_spans() -> Callable[[], None]:
    """Export spans by OTLP over HTTP from now on, if the OTEL_… variables name an endpoint; returns a function that
    flushes the last ones. The SDK itself reads the other variables. A missing package is only a warning, because
    platforms set these variables for all of their containers.
    """
    off = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if off or os.environ.get("OTEL_TRACES_EXPORTER") == "none" or not any(map(os.environ.get, _ENDPOINTS)):
        return lambda: None
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        logger.warning("no spans are exported: %s; %s", error, install_hint("otel"))
        return lambda: None
    name = {"service.name": os.environ.get("OTEL_SERVICE_NAME") or "ragkv"}
    provider = TracerProvider(resource=Resource.create(name))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return provider.shutdown


class JsonLine(logging.Formatter):
    """A record as one line of JSON: time, level, logger, message or `fields`, request, trace and traceback."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": when, "level": record.levelname.lower(), "logger": record.name}
        fields = getattr(record, "fields", None)
        line |= {"message": record.getMessage()} if fields is None else {"message": "request", **fields}
        if identifier := request_id.get():
            line.setdefault("request", identifier)
        if (api := sys.modules.get("opentelemetry.trace")) is not None:
            context = api.get_current_span().get_span_context()
            if context.is_valid:
                line |= {"trace": f"{context.trace_id:032x}", "span": f"{context.span_id:016x}"}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class LogStream(io.TextIOBase):
    """A text stream whose lines become log records, for what libraries, commands and tracebacks write to stderr."""

    encoding, errors = "utf-8", "replace"

    def __init__(self) -> None:
        self._rest = ""
        self.rich_proxied_file = self  # where rich writes to, instead of the stream below a guard

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if shown := line.rpartition("\r")[2].rstrip():  # of a progress bar that is redrawn, only the last state
                level = logging.ERROR if shown.startswith("ragkv: ") else logging.INFO
                logging.getLogger("ragkv").log(level, "%s", shown)
        return len(text)


def log_as_json(stream: IO[str]) -> None:
    """Write every log record as JSON to `stream`, including ragkv's and uvicorn's from level "info" on, and turn what
    is written to stderr, and warnings, into records.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLine())
    logging.basicConfig(level=logging.getLogger().level, handlers=[handler], force=True)
    for name in ("ragkv", "uvicorn"):
        logging.getLogger(name).setLevel(min(logging.getLogger().level, logging.INFO))
    logging.captureWarnings(True)
    sys.stderr = LogStream()
