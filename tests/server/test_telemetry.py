"""What an operator sees: spans from search to last token, request ids, and a JSON log; none contains text."""

import json
import logging
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from indexed import indexed
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from words import install

from ragkv.errors import NothingFoundError
from ragkv.types import ScoredChunk

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
QUESTION = "Who founded Halden Works?"


@pytest.fixture
def spans(monkeypatch):
    """The ended spans by name, and the name of each one's parent (None if it is not among them)."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)

    def ended():
        ended_spans = exporter.get_finished_spans()
        names = {entry.context.span_id: entry.name for entry in ended_spans}
        assert len(set(names.values())) == len(ended_spans)
        for entry in ended_spans:
            told = json.dumps([entry.name, dict(entry.attributes), [dict(event.attributes) for event in entry.events]])
            assert not any(word in told for word in ("Who", "founded", "Halden", "Mira", "Bolt"))
        parents = {entry.name: names.get(entry.parent.span_id) if entry.parent else None for entry in ended_spans}
        return {entry.name: entry for entry in ended_spans}, parents

    return ended


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "ragkv/two:pced", "messages": [{"role": "user", "content": QUESTION}]}),
        ("/api/indexes/two/query", {"question": QUESTION, "engine": "pced"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answers_spans_continue_the_clients_trace(call, rag, spans, path, body, stream):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    most = {"max_tokens" if "messages" in body else "max_new_tokens": 5}
    assert call("POST", path, json={**body, **most, "stream": stream}, headers=headers).status_code == 200
    ended_spans, parents = spans()
    route = path.replace("two", "{name}")
    stages = ("ragkv.search", "ragkv.kv.load", "ragkv.prefill", "ragkv.decode")
    assert parents == {f"POST {route}": None, "ragkv.answer": f"POST {route}"} | dict.fromkeys(stages, "ragkv.answer")
    assert {f"{entry.context.trace_id:032x}" for entry in ended_spans.values()} == {TRACE}
    server, answer = ended_spans[f"POST {route}"], ended_spans["ragkv.answer"]
    assert f"{server.parent.span_id:016x}" == PARENT
    assert server.kind is trace.SpanKind.SERVER
    assert dict(server.attributes) == {
        "http.request.method": "POST", "http.route": route, "http.response.status_code": 200,
        "ragkv.request_id": "mine", "ragkv.index": "two",
    }  # fmt: skip
    expected = rag.query(QUESTION, engine="pced", max_new_tokens=5)
    told = answer.attributes
    assert (told["ragkv.engine"], told["gen_ai.usage.output_tokens"]) == ("pced", len(expected.trace))
    assert told["gen_ai.response.finish_reasons"] == (expected.finish_reason,)
    loaded = ended_spans["ragkv.kv.load"].attributes
    assert loaded["ragkv.kv.hits"] == expected.kv.hits == told["ragkv.chunks"] > 0
    assert (loaded["ragkv.kv.bytes"], loaded["ragkv.kv.misses"]) == (expected.kv.bytes, 0)
    assert all(entry.start_time <= entry.end_time for entry in ended_spans.values())


def test_kv_that_a_question_encodes_has_a_span(rag, spans):
    chunk = rag.chunk("Halden Works was sold in 1931.", chunk_id="given")
    given = ScoredChunk(chunk=chunk, source="", retrieval_score=0.0, rerank_score=None, score=0.5)
    rag.query(QUESTION, engine="ape", chunks=[given], max_new_tokens=2)
    found, parents = spans()
    assert parents["ragkv.kv.encode"] == "ragkv.kv.load"
    assert found["ragkv.kv.encode"].attributes["ragkv.kv.encode.tokens"] == len(chunk.token_ids)
    assert found["ragkv.kv.load"].attributes["ragkv.kv.misses"] == 1


def test_a_reranker_has_a_span_between_search_and_prefill(spans, tmp_path, model_folder, monkeypatch):
    install(monkeypatch)
    settings = {"model": model_folder, "engines": ("ape",), "reranker": "words", "candidates": 7}
    with indexed(tmp_path, {"a.txt": "Halden Works was founded by Mira Oskel."}, **settings) as rag:
        answer = rag.query(QUESTION, max_new_tokens=2)
    assert answer.sources[0].rerank_score is not None
    ended_spans, parents = spans()
    reranked = ended_spans["ragkv.rerank"]
    assert (parents["ragkv.rerank"], dict(reranked.attributes)) == ("ragkv.answer", {"ragkv.rerank.candidates": 7})
    assert ended_spans["ragkv.search"].end_time <= reranked.start_time + 1000  # rounding of seconds stored as floats
    assert reranked.end_time <= ended_spans["ragkv.prefill"].start_time + 1000
    assert (reranked.end_time - reranked.start_time) / 1e6 == pytest.approx(answer.timing.rerank, abs=0.01)


def test_many_answers_have_a_span_each(rag, spans, monkeypatch):
    names = []
    monkeypatch.setattr(
        "ragkv.index.answer.Span.end", lambda self, *_, **__: names.append(self._span and self._span.name)
    )
    list(rag.query_each([QUESTION] * 3, max_new_tokens=2))
    assert names.count("ragkv.answer") == 3


def test_an_error_is_named_by_its_class_alone(rag, spans):
    with pytest.raises(NothingFoundError):
        rag.query("Zyxqv?")
    found, parents = spans()
    assert parents == {"ragkv.search": "ragkv.answer", "ragkv.answer": None}
    answer = found["ragkv.answer"]
    assert (answer.attributes["error.type"], answer.status.is_ok, answer.events) == ("NothingFoundError", False, ())


def test_health_checks_and_the_page_have_no_span(call, spans):
    for path in ("/healthz", "/metrics", "/"):
        call("GET", path)
    assert spans() == ({}, {})


@pytest.mark.parametrize(
    ("sent", "taken"),
    [
        ("a/B:7._+=@-", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("", False),
        ("a b", False),
        ('"', False),
        ("-x", False),
    ],
)
def test_a_request_id_is_taken_or_made(call, caplog, sent, taken):
    with caplog.at_level(logging.INFO):
        response = call("GET", "/api/indexes/three/documents", headers={"x-request-id": sent})
    identifier = response.headers["x-request-id"]
    assert (identifier == sent) is taken
    assert taken or len(identifier) == 32
    assert response.json()["error"]["request_id"] == identifier
    [line] = [record.fields for record in caplog.records if hasattr(record, "fields")]
    assert line["request"] == identifier


def run(code, **variables):
    """Run a Python process to its end."""
    return subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=600)


def test_all_that_reaches_stderr_is_json():
    code = """
import logging, sys, warnings
from ragkv.util.telemetry import log_as_json, take_request_id
log_as_json(sys.stderr)
logging.getLogger("uvicorn.error").info("up\\n\\x1b[2J")
logging.getLogger("urllib3").info("never")
take_request_id("mine")
warnings.warn("old")
print("ragkv: no.", file=sys.stderr)
sys.stderr.write("\\r 1%\\r 2%\\n")
logging.getLogger("ragkv").error("it failed", exc_info=ZeroDivisionError())
{}["x"]
"""
    lines = [json.loads(line) for line in run(code).stderr.splitlines()]
    assert [(line["logger"], line["level"], line["message"][:20].strip()) for line in lines[:6]] == [
        ("uvicorn.error", "info", "up\n\x1b[2J"), ("py.warnings", "warning", lines[1]["message"][:20].strip()),
        ("ragkv", "error", "ragkv: no."), ("ragkv", "info", "2%"),
        ("ragkv", "error", "it failed"), ("ragkv", "info", "Traceback (most rece"),
    ]  # fmt: skip
    assert "old" in lines[1]["message"]
    assert [line.get("request") for line in lines] == [None, *["mine"] * (len(lines) - 1)]
    assert "ZeroDivisionError" in lines[4]["exception"]
    assert lines[-1]["message"] == "KeyError: 'x'"


def test_spans_are_exported_as_the_variables_say():
    asked = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append((self.path, self.headers["x-key"], self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            return

    code = "from ragkv.util.telemetry import *; end = export_spans(); Span('one').end(); end()"
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        told = run(
            code, OTEL_EXPORTER_OTLP_ENDPOINT=url, OTEL_EXPORTER_OTLP_HEADERS="x-key=k", OTEL_SERVICE_NAME="desk"
        )
        server.shutdown()
    assert told.stderr == ""
    [(path, key, body)] = asked
    assert (path, key, b"one" in body, b"desk" in body) == ("/v1/traces", "k", True, True)


@pytest.mark.parametrize("variable", [{}, {"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_SDK_DISABLED": "true"}])
def test_nothing_is_exported_unless_asked_for(variable):
    code = "import sys; from ragkv.util.telemetry import *; export_spans()(); print('opentelemetry' in sys.modules)"
    result = run(code, **({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"} if variable else {}), **variable)
    assert (result.stdout, result.stderr) == ("False\n", "")
