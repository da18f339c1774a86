"""schemathesis calls all routes by the OpenAPI description: none fails, and every response conforms."""

from contextlib import closing
from unittest.mock import patch

import pytest
from guarded import Lengths, guarded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nightly import NIGHTLY

from ragkv import RagKV
from ragkv.ingest import from_bytes
from ragkv.server.app import make_app
from ragkv.server.jobs import JobManager
from ragkv.server.metrics import ConcurrencyLimiter
from ragkv.server.schemas import ServedIndexes

ROUTES = [
    "GET /healthz",
    "GET /readyz",
    "GET /metrics",
    "GET /v1/models",
    "GET /v1/models/{identifier}",
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/embeddings",
    "POST /v1/rerank",
    "POST /v1/responses",
    "GET /api/indexes",
    "POST /api/indexes",
    "POST /api/indexes/{name}/query",
    "POST /api/indexes/{name}/query/check",
    "POST /api/indexes/{name}/search",
    "GET /api/indexes/{name}/samples",
    "GET /api/indexes/{name}/documents",
    "POST /api/indexes/{name}/documents",
    "GET /api/indexes/{name}/documents/{document_id}",
    "GET /api/indexes/{name}/documents/{document_id}/chunks",
    "DELETE /api/indexes/{name}/documents/{document_id}",
    "GET /api/indexes/{name}/chunks/{chunk_id}",
    "GET /api/indexes/{name}/jobs",
    "GET /api/indexes/{name}/jobs/{job_id}",
    "GET /api/indexes/{name}/jobs/{job_id}/events",
    "DELETE /api/indexes/{name}/jobs/{job_id}",
]
PAGED = {"GET /api/indexes/{name}/documents", "GET /api/indexes/{name}/documents/{document_id}/chunks"}
QUESTION = "Who founded Halden Works?"
MODES = {"fitting": "POSITIVE", "not fitting": "NEGATIVE"}


@pytest.fixture(scope="module")
def schemathesis():
    """Imported lazily: it takes seconds."""
    return pytest.importorskip("schemathesis", reason="schemathesis, of the extra dev, is not installed")


@pytest.fixture(scope="module")
def described(schemathesis, folder):
    """Existing names by kind, and the operations that an app over an index describes, by route."""
    with RagKV.open(folder, device="cpu") as rag:
        served, limiter = ServedIndexes({"two": rag}), ConcurrencyLimiter(8)
        desk = JobManager(served, limiter)
        app = make_app(served, limiter, desk)
        app.state.ready = True
        names = [f"{number}.txt" for number in range(9)]
        queue = desk.queue("two")
        rag.ingest(*(from_bytes(b"Kesk Mills makes flour.", name=name) for name in names))
        job = queue.accept([])  # an empty job, which fails
        known = {
            "name": ["two"],
            "identifier": ["ragkv/two:ape", "two"],
            "document_id": [f"stdin:{name}" for name in names],
            "chunk_id": [chunk.chunk_id for chunk in rag.store.chunks()],
            "job_id": [job.facts.id],
        }
        with (
            closing(desk),
            patch.object(type(rag.index.encoders), "embedder", Lengths()),
            patch.object(type(rag.index.encoders), "reranker", Lengths()),
        ):
            schema = schemathesis.openapi.from_asgi("/openapi.json", guarded(app))
            operations = [result.ok() for result in schema.get_all_operations()]
            yield known, {operation.label: operation for operation in operations}


def test_every_route_is_described(described):
    assert sorted(described[1]) == sorted(ROUTES)


@pytest.mark.parametrize(
    ("route", "mode"),
    [
        *((route, "fitting") for route in ROUTES),
        *((route, "not fitting") for route in ROUTES if route.startswith("POST") or route in PAGED),
    ],
)
def test_no_request_makes_it_fail(schemathesis, described, route, mode):
    known, operations = described
    cases = operations[route].as_strategy(generation_mode=schemathesis.GenerationMode[MODES[mode]])
    checks = schemathesis.checks.CHECKS.get_by_names(
        ["not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"]
    )

    @settings(
        max_examples=300 if NIGHTLY else 3,
        derandomize=not NIGHTLY,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases, chance=st.randoms(use_true_random=False))
    def ask(case, chance):
        if chance.random() < 0.8:
            _make_likely(case, known, chance)
        _shorten(case)
        response = case.call()
        case.validate_response(response, checks=checks)

    ask()


def _make_likely(case, known, chance):
    """Use existing names, and allowed values for a question."""
    case.path_parameters = {name: chance.choice(known[name]) for name in case.path_parameters or {}}
    if isinstance(case.body, dict) and "files" in case.body:
        case.body["files"] = [("a.txt", b"Kesk Mills makes flour.")]
    elif isinstance(case.body, dict):
        likely = {
            "model": "two", "question": QUESTION, "messages": [{"role": "user", "content": QUESTION}], "top_k": 2,
            "prompt": QUESTION, "input": QUESTION,
            "engine": chance.choice(["ape", "full", "pced"]), "retrieval": "bm25", "rerank": False, "candidates": 9,
            "where": [], "temperature": 0.5, "top_p": 0.5, "min_p": 0.5, "top_k_tokens": 9, "repetition_penalty": 1.1,
            "seed": 7, "history": [],
        }  # fmt: skip
        fit = {name: likely[name] for name in case.body if name in likely and chance.random() < 0.9}
        case.body = {**case.body, **fit}


def _shorten(case):
    """Limit the length of answers."""
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens"):
        if isinstance(case.body, dict) and type(case.body.get(name)) is int:
            case.body[name] = min(case.body[name], 2)
