"""The server's own API: questions with every score and each token's expert, indexes, documents, chunks."""

import json
from dataclasses import replace
from urllib.parse import quote

import pytest
from guarded import events
from heldmodel import HeldModel
from script import written

from ragkv import RagKV
from ragkv.index.batch import AsyncAnswerStream

QUESTION = "Who founded Halden Works?"


def untimed(payload):
    """An answer in JSON, without values that differ between runs."""
    payload = json.loads(json.dumps(payload))
    kv = {name: value for name, value in payload["kv"].items() if name == "tokens"}
    sources = [{name: value for name, value in each.items() if name != "url"} for each in payload["sources"]]
    return {**payload, "timing_ms": sorted(payload["timing_ms"]), "kv": kv, "sources": sources}


@pytest.fixture
def ask(call):
    """Ask the index a question; returns the response."""

    def asked(question=QUESTION, **more):
        body = {"question": question, "max_new_tokens": 6, **more}
        kind = {"content-type": "application/json"}
        return call("POST", "/api/indexes/two/query", content=json.dumps(body), headers=kind)

    return asked


@pytest.mark.parametrize("engine", ["full", "ape", "blend", "block", "pced"])
def test_an_answer_is_that_of_a_single_query(rag, ask, call, engine):
    expected = rag.query(QUESTION, engine=engine, max_new_tokens=6)
    payload = ask(engine=engine).json()
    assert untimed(payload) == untimed(expected.to_json())
    assert all(source["stages"] for source in payload["sources"])
    for source in payload["sources"]:
        assert call("GET", source["url"]).json()["text"] == source["text"]


def test_options_are_those_of_a_query(rag, ask):
    decoding = {"temperature": 0.8, "top_p": 0.9, "seed": 7, "stop": ["zzz"]}
    options = {"engine": "ape", "top_k": 1, "retrieval": "bm25", "where": ["source=halden.md"]}
    expected = rag.query(QUESTION, max_new_tokens=6, decoding=decoding, **options)
    assert untimed(ask(**options, **decoding).json()) == untimed(expected.to_json())


@pytest.mark.parametrize("engine", ["ape", "pced"])
def test_the_trace_says_which_expert_won_each_token(rag, ask, engine):
    payload = ask(engine=engine, trace=True).json()
    tokens = payload["trace"]["tokens"]
    assert "".join(token["text"] for token in tokens).strip() == payload["answer"]
    assert rag.model.tokens.decode([token["id"] for token in tokens]).strip() == payload["answer"]
    for place, source in enumerate(payload["sources"]):
        won = sum(token["source"] == place for token in tokens)
        assert source["tokens_won"] == (won if engine == "pced" else None)
    assert all((token["source"] is None) == (engine == "ape") for token in tokens)
    assert "trace" not in ask(engine=engine).json()


def test_a_stream_says_the_same(ask):
    whole = ask(engine="pced", trace=True).json()
    response = ask(engine="pced", trace=True, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    result = events(response)
    names = [name for name, _ in result]
    assert names == ["sources", *["token"] * (len(names) - 2), "done"]
    assert [source["url"] for source in result[0][1]["sources"]] == [source["url"] for source in whole["sources"]]
    assert "".join(data["text"] for name, data in result if name == "token") == whole["answer"]
    assert {data["source"] for name, data in result if name == "token"} <= set(range(len(whole["sources"])))
    assert untimed(result[-1][1]) == untimed(whole)


def test_sentences_are_cited_if_asked_for(ask, rag, monkeypatch):
    payload = ask(question="Who founded Bolt Ltd?", citations=True, max_new_tokens=4).json()
    assert payload["refused"] is False
    assert all(0 <= place < len(payload["sources"]) for each in payload["citations"] for place in each["sources"])
    finish = AsyncAnswerStream.answer.fget
    message = "Bolt Ltd was founded by Ann Lee."
    monkeypatch.setattr(AsyncAnswerStream, "answer", property(lambda stream: replace(finish(stream), text=message)))
    payload = ask(question="Who founded Bolt Ltd?", citations=True, max_new_tokens=4).json()
    place = next(n for n, source in enumerate(payload["sources"]) if "Ann Lee" in source["text"])
    assert payload["citations"] == [{"start": 0, "end": len(message), "sources": [place]}]


def test_the_sources_come_before_the_first_token(ask, rag, monkeypatch):
    """They are sent during prefill."""
    held = HeldModel(rag, monkeypatch, last=1)
    sent = []
    say = "ragkv.server.api.event"
    from ragkv.server import api

    def noted(body, name=None, real=api.event):
        sent.append((name, held.cancelled.is_set()))
        if name == "sources":
            held.cancelled.set()
        return real(body, name)

    monkeypatch.setattr(say, noted)
    assert ask(stream=True).status_code == 200
    assert sent[0] == ("sources", False)


def test_earlier_turns_are_used_as_the_request_says(rag, ask):
    history = [{"question": "What does Bolt Ltd make?", "answer": "Valves."}]
    payload = ask("And who founded it?", history=history).json()
    assert payload["question"] == "And who founded it?"
    assert "Bolt" in payload["sources"][0]["text"]
    alone = ask("And who founded it?").json()
    payload = ask("And who founded it?", history=history, history_mode="none").json()
    assert untimed(payload) == untimed(alone)
    searched = ask("And who founded it?", history=history, history_mode="prompt", history_tokens=0).json()
    assert untimed(searched) == untimed(ask("And who founded it?", history=history, history_mode="search").json())
    assert searched["sources"][0]["score"] != alone["sources"][0]["score"]


def test_queries_that_the_model_writes_are_events_and_in_the_answer(ask, call, monkeypatch):
    texts = ["Who founded Bolt Ltd?", "", "Yes."] * 2
    written(monkeypatch, ["block"], {"steps here": texts})
    asked = {"engine": "block", "top_k": 1, "steps": 3}
    payload = ask("The steps here are those of Works", **asked).json()
    [query] = payload["queries"]
    assert (query.endswith(texts[0]), payload["answer"]) == (True, "Yes.")
    streamed = events(ask("The steps here are those of Works", stream=True, **asked))
    assert [name for name, _ in streamed][:2] == ["query", "sources"]
    assert streamed[0][1] == {"text": query}
    assert streamed[-1][1]["queries"] == [query]
    assert ask().json()["queries"] == []
    chat = {"model": "two", "messages": [{"role": "user", "content": "Halden Works"}], "max_tokens": 2}
    assert call("POST", "/v1/chat/completions", json=chat).json()["queries"] == []
    for body in ({"steps": 0}, {"steps": 9}):
        refused = ask(**body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "steps")
        assert refused.json()["error"]["message"] == f"steps must be from 1 to 8, not {body['steps']}."
        refused = call("POST", "/v1/chat/completions", json=chat | body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "steps")
    history = [{"question": "What does Bolt Ltd make?", "answer": "Valves."}]
    written(monkeypatch, ["full"], {"Write the last question": ["Halden Works 1907?"] * 2})
    asked = {"history": history, "history_mode": "search", "rewrite": True}
    assert ask("And who founded it?", **asked).json()["queries"] == ["Halden Works 1907?"]
    first, second = {"role": "user", "content": "Bolt?"}, {"role": "assistant", "content": "Valves."}
    talk = chat | {"messages": [first, second, *chat["messages"]], "rewrite": True, "stream": True}
    said = call("POST", "/v1/chat/completions", json=talk).text
    assert '"queries":["Halden Works 1907?"]' in said.replace(": ", ":")


def test_warnings_are_given_if_asked_for(ask):
    [warning] = ask(engine="block", warnings=True).json()["warnings"]
    assert "not trained for Block-Attention" in warning
    assert events(ask(engine="block", warnings=True, stream=True))[0] == ("warnings", {"warnings": [warning]})
    assert "warnings" not in ask(engine="full", warnings=True).json()
    assert "warnings" not in ask(engine="block").json()


def test_a_question_is_checked_without_an_answer(call, rag, monkeypatch):
    monkeypatch.setattr(rag.model, "step", lambda *_, **__: pytest.fail("the model was run"))
    path = "/api/indexes/two/query/check"
    assert call("POST", path, json={"question": "?"}).json() == {"engine": rag.config.default_engine, "warnings": []}
    found = call("POST", path, json={"question": "?", "engine": "block", "warnings": True}).json()
    assert (found["engine"], len(found["warnings"])) == ("block", 1)
    refused = call("POST", path, json={"question": "?", "engine": "nothing"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "engine")


def test_a_search_finds_what_an_answer_is_made_from(call, rag):
    body = {"question": QUESTION, "top_k": 1, "retrieval": "bm25", "where": ["source=*.md"]}
    [chunk] = call("POST", "/api/indexes/two/search", json=body).json()["chunks"]
    [expected] = rag.retrieve(QUESTION, top_k=1, retrieval="bm25", where=["source=*.md"])
    assert (chunk["chunk_id"], chunk["score"]) == (expected.chunk.chunk_id, expected.score)
    assert call("GET", chunk["url"]).json()["text"] == chunk["text"]
    assert call("POST", "/api/indexes/two/search", json={"question": "Xyzzy?"}).json() == {"chunks": []}
    assert call("POST", "/api/indexes/two/search", json={"question": "?", "top_k": 0}).status_code == 400


def test_documents_are_listed_by_condition(call):
    def listed(**params):
        page = call("GET", "/api/indexes/two/documents", params=params).json()
        return [document["source"] for document in page["documents"]], page["total"]

    assert listed(where="source=*.md") == (["halden.md"], 2)
    assert listed(where=["source=*.md"], name="halden") == (["halden.md"], 2)
    assert listed(where=["source=*.md"], name="bolt") == ([], 2)
    assert call("GET", "/api/indexes/two/documents", params={"where": "source=none"}).status_code == 400


@pytest.mark.parametrize("method", ["DELETE", "POST"])
@pytest.mark.parametrize("path", ["/local/server", "/local/answers/one", "/api/indexes/_/query"])
def test_what_is_for_the_command_line_is_only_at_the_socket(call, method, path):
    assert call(method, path, json={}).status_code in (400, 404, 405)


def test_the_command_lines_header_counts_for_nothing_elsewhere(call, rag):
    header = {"ragkv-expects": json.dumps({"identity": "another", "opened": None, "id": "one"})}
    body = {"question": QUESTION, "where": ["source=none"]}
    response = call("POST", "/api/indexes/two/query", json=body, headers=header)
    assert response.status_code == 400
    assert list(response.json()) == ["error"]
    assert str(rag.folder) not in response.text


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"question": " "}, 400, "question"),
        ({"question": "\ud800"}, 400, None),
        ({"history": [{"question": "\ud800", "answer": "a"}]}, 400, None),
        ({"engine": "\ud800"}, 400, "engine"),
        ({"retrieval": "dense"}, 422, "retrieval"),
        ({"max_new_tokens": 0}, 400, "max_new_tokens"),
        ({"history": [{"question": "a"}]}, 400, "history.0.answer"),
        ({"surprise": 1}, 400, "surprise"),
        ({"question": "Xyzzy?"}, 422, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_question_that_cannot_be_answered_is_told_why(ask, change, status, param, stream):
    response = ask(**{"stream": stream, **change})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert error["message"]


def test_an_error_under_way_is_an_event(ask, torn):
    found = events(ask(stream=True, max_new_tokens=30))
    assert found[0][0] == "sources"
    name, data = found[-1]
    del data["error"]["request_id"]
    assert (name, data["error"]) == (
        "error",
        {"message": "It broke.", "type": "retrieval_error", "param": None, "code": "nothing_retrieved"},
    )


def test_an_index_that_there_is_not(call):
    for method, path in (("GET", "documents"), ("GET", "documents/a"), ("GET", "documents/a/chunks")):
        response = call(method, f"/api/indexes/three/{path}")
        assert (response.status_code, response.json()["error"]["param"]) == (404, "name")
    assert call("POST", "/api/indexes/three/query", json={"question": "a"}).status_code == 404


def test_the_indexes_say_what_may_be_asked_of_them(call, rag):
    [index] = call("GET", "/api/indexes").json()["indexes"]
    assert index["name"] == "two"
    assert (index["documents"], index["chunks"]) == (2, rag.store.stats().chunks)
    assert rag.config.model.endswith(f"/{index['model']}")  # without the path
    assert "/" not in index["model"]
    assert {"full", "ape", "block", "pced"} <= set(index["engines"])
    assert index["default_engine"] == rag.config.default_engine
    assert index["retrieval"] == ["bm25"]
    assert index["writable"] is True
    assert index["embedder"] is index["reranker"] is index["rerank"] is False


def test_documents_are_listed_in_pages(call, rag):
    first = call("GET", "/api/indexes/two/documents?limit=1").json()
    rest = call("GET", "/api/indexes/two/documents", params={"after": first["next"]}).json()
    assert rest["next"] is None
    found = [*first["documents"], *rest["documents"]]
    assert {document["source"] for document in found} == {"halden.md", "a [b](c).txt"}
    for document in found:
        path = f"/api/indexes/two/documents/{quote(document['document_id'], safe='')}"
        payload = call("GET", path).json()
        assert {name: payload[name] for name in document} == document
        assert payload["characters"] == len(rag.store.text(document["document_id"])) > 0


@pytest.mark.parametrize(
    ("pattern", "names"),
    [("HALDEN", {"halden.md"}), ("*.txt", {"a [b](c).txt"}), ("a", {"halden.md", "a [b](c).txt"}), ("none", set())],
)
def test_documents_are_found_by_name(call, pattern, names):
    found = call("GET", "/api/indexes/two/documents", params={"name": pattern}).json()
    assert {document["name"] for document in found["documents"]} == names


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=many", f"name={'a' * 501}"])
def test_a_page_has_bounds(call, query):
    assert call("GET", f"/api/indexes/two/documents?{query}").status_code == 400


@pytest.mark.parametrize("after", [-2, 2**53, 2**63 - 1, 10**30])
def test_a_page_of_chunks_has_bounds(call, rag, after):
    name = quote(next(iter(rag.list_documents().documents)).document.document_id, safe="")
    response = call("GET", f"/api/indexes/two/documents/{name}/chunks?after={after}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "after")


@pytest.fixture(scope="module")
def long_name(tmp_path_factory, model_folder):
    """An index with a document of several chunks, and one whose id ends like a route."""
    place = tmp_path_factory.mktemp("long")
    (place / "doc").mkdir()
    (place / "doc" / "chunks").write_text("Kesk Mills makes flour.")
    (place / "mills.txt").write_text("\n\n".join(f"Mill {n} grinds {'oats and rye ' * 12}daily." for n in range(9)))
    made = tmp_path_factory.mktemp("indexes") / "long"
    with RagKV.create(made, model=str(model_folder), device="cpu", chunk_tokens=128) as fresh:
        fresh.ingest(place / "mills.txt", place / "doc" / "chunks")
        yield fresh


def test_a_documents_chunks_are_told_in_order(long_name, app_of, call_on):
    app = app_of(long=long_name)
    document = next(d.document for d in long_name.store.document_stats() if d.source == "mills.txt")
    path = f"/api/indexes/long/documents/{quote(document, safe='')}/chunks"
    expected = [chunk.text for chunk in long_name.store.chunks(document)]
    assert len(expected) > 3
    result, after = [], -1
    while after is not None:
        page = call_on(app, "GET", path, params={"limit": 2, "after": after}).json()
        assert len(page["chunks"]) <= 2
        result += page["chunks"]
        after = page["next"]
    assert [chunk["text"] for chunk in result] == expected
    assert [chunk["ordinal"] for chunk in result] == list(range(len(expected)))
    text = long_name.store.text(document)
    assert all(text[chunk["start"] : chunk["end"]] == chunk["text"] for chunk in result)


def test_an_id_may_end_like_a_route(long_name, app_of, call_on):
    app = app_of(long=long_name)
    document = next(d.document for d in long_name.store.document_stats() if d.source == "chunks")
    path = f"/api/indexes/long/documents/{quote(document, safe='')}"
    assert call_on(app, "GET", path).json()["document_id"] == document
    assert call_on(app, "GET", f"{path}/chunks").json()["chunks"][0]["text"] == "Kesk Mills makes flour."
    missing = document.removesuffix("/chunks")
    assert call_on(app, "GET", f"/api/indexes/long/documents/{quote(missing, safe='')}/chunks").status_code == 404
