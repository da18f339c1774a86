"""OpenAI's protocol over an index, without a socket: answers, streams, errors, and ragkv's extensions."""

import asyncio
import base64
import copy
import json
import math
import struct
import sys
import threading
from itertools import product

import pytest
from guarded import Lengths, guarded, posted

from ragkv import RagKV
from ragkv.index.answer import AnswerStream
from ragkv.types import ScoredChunk

QUESTION = "Who founded Halden Works?"


def events(response):
    """The objects of a stream that ends with [DONE]."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def sentence(found):
    return "".join(choice["delta"].get("content", "") for each in found for choice in each.get("choices", ()))


@pytest.mark.parametrize("engine", ["full", "ape", "blend", "block", "pced"])
def test_an_answer_is_that_of_a_single_query(rag, chat, engine):
    expected = rag.query(QUESTION, engine=engine, max_new_tokens=6)
    result = chat(model=f"ragkv/two:{engine}").json()
    [choice] = result["choices"]
    assert choice["message"]["content"] == expected.text
    assert choice["finish_reason"] == expected.finish_reason
    assert [source["chunk_id"] for source in result["sources"]] == [s.chunk_id for s in expected.sources]
    assert result["usage"]["completion_tokens"] <= 6
    assert result["usage"]["total_tokens"] == result["usage"]["prompt_tokens"] + result["usage"]["completion_tokens"]


def test_a_stream_says_the_same(chat):
    whole = chat().json()
    pieces = events(chat(stream=True, stream_options={"include_usage": True}))
    assert pieces[0]["choices"][0]["delta"]["role"] == "assistant"
    assert sentence(pieces) == whole["choices"][0]["message"]["content"]
    assert [c["finish_reason"] for item in pieces for c in item["choices"] if c["finish_reason"]] == [
        whole["choices"][0]["finish_reason"]
    ]
    assert pieces[-2]["sources"] == whole["sources"]
    assert (pieces[-1]["choices"], pieces[-1]["usage"]) == ([], whole["usage"])
    assert len({item["id"] for item in pieces}) == 1


def test_sources_come_three_ways(chat, call):
    result = chat(footer=True).json()
    message = result["choices"][0]["message"]
    assert sentence(events(chat(footer=True, stream=True))) == message["content"]
    urls = [source["url"] for source in result["sources"]]
    assert [each["url_citation"]["url"] for each in message["annotations"]] == urls
    below = message["content"].partition("\n\nSources:\n")[2].splitlines()
    assert len(below) == len(urls) == 2
    assert all(url in line for url, line in zip(urls, below, strict=True))
    assert any(r"a \[b\]\(c\).txt" in line for line in below)  # a file name is not interpreted as Markdown
    for url, source in zip(urls, result["sources"], strict=True):
        assert call("GET", url).json()["text"] == source["text"]


def test_earlier_turns_and_instructions_reach_the_prompt(chat):
    first = [{"role": "user", "content": "What does Bolt Ltd make?"}, {"role": "assistant", "content": "Valves."}]
    last = {"role": "user", "content": "And who founded it?"}
    alone, after = (chat(messages=[*before, last]).json()["usage"]["prompt_tokens"] for before in ([], first))
    result = chat(messages=[{"role": "system", "content": "Be brief."}, *first, last]).json()["usage"]["prompt_tokens"]
    assert alone < after < result


NEUTRAL = {"n": 1, "logprobs": False, "tools": None, "response_format": {"type": "text"}, "store": False}
"""Values of parameters that ask for nothing."""


def test_what_clients_send_for_themselves_changes_nothing(chat):
    sent = dict.fromkeys(("user", "service_tier", "prompt_cache_key", "reasoning_effort", "verbosity"), "low")
    answers = [chat(**more).json()["choices"] for more in ({}, sent | {"metadata": {"a": "b"}, **NEUTRAL})]
    assert answers[0] == answers[1]


def formatted(schema):
    return {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": schema}}


@pytest.mark.parametrize("engine", ["full", "pced"])
def test_an_answer_is_as_its_schema_says(chat, engine):
    """By the schemas of OpenAI and of ragkv, complete and streamed; a random model gives random answers."""
    schema = {"type": "object", "properties": {"year": {"enum": [1907, 7]}}, "required": ["year"]}
    asked = {
        "engine": engine,
        "max_tokens": 400,
        "response_format": formatted(schema | {"additionalProperties": False}),
    }
    result = chat(**asked).json()
    assert json.loads(result["choices"][0]["message"]["content"])["year"] in (1907, 7)
    assert list(result["fields"]) == (["/year"] if engine == "pced" else [])
    assert sentence(events(chat(**asked, stream=True))) == result["choices"][0]["message"]["content"]
    del asked["response_format"]
    assert chat(**asked, regex="[ab]{3}").json()["choices"][0]["message"]["content"] in map(
        "".join, product("ab", repeat=3)
    )


@pytest.mark.parametrize("stream", [False, True])
def test_where_nothing_is_found_json_is_an_error_and_no_sentence(chat, stream):
    assert "Zzyzx" not in chat("Zzyzx?", stream=stream).text
    response = chat("Zzyzx?", stream=stream, response_format={"type": "json_object"})
    assert (response.status_code, response.json()["error"]["code"]) == (422, "nothing_retrieved")


@pytest.mark.parametrize("engine", ["full", "pced"])
def test_what_a_model_thinks_is_no_part_of_its_answer(chat, call, rag, monkeypatch, engine):
    asked = {"engine": engine, "thinking": 5, "max_tokens": 40, "regex": "[ab]{3}", "temperature": 2.0, "seed": 3}
    assert chat(**asked).json()["error"]["param"] == "thinking"  # this model's template has no thinking
    tokens = copy.copy(rag.model.tokens)
    vars(tokens).pop("thought")
    monkeypatch.setattr(tokens, "_tokenizer", copy.deepcopy(tokens._tokenizer))
    tokens._tokenizer.chat_template += "{# </think> #}"
    monkeypatch.setattr(rag.model, "tokens", tokens)
    message = chat(**asked).json()["choices"][0]["message"]
    streamed = events(chat(**asked, stream=True))
    thought = "".join(each["choices"][0]["delta"].get("reasoning_content", "") for each in streamed)
    assert thought == message["reasoning_content"] != ""
    assert sentence(streamed) == message["content"]
    assert len(message["content"]) == 3
    own = {"question": QUESTION, "engine": engine, "thinking": 5, "regex": "[ab]{3}", "temperature": 2.0, "seed": 3}
    result = call("POST", "/api/indexes/two/query", json={**own, "max_new_tokens": 40, "trace": True}).json()
    assert (result["answer"], result["reasoning"]) == (message["content"], thought)
    assert len(result["trace"]["tokens"]) == 3
    assert sum(source["tokens_won"] or 0 for source in result["sources"]) == (3 if engine == "pced" else 0)
    assert "reasoning_content" not in chat(**asked | {"thinking": "off"}).json()["choices"][0]["message"]


def called(parameters, name="find"):
    return [{"type": "function", "function": {"name": name, "parameters": parameters}}]


@pytest.mark.parametrize(
    ("change", "status", "param", "code"),
    [
        ({"model": "gpt-4"}, 404, "model", "model_not_found"),
        ({"model": "ragkv/two:nothing"}, 404, "model", "model_not_found"),
        ({"model": "two\ud800"}, 404, "model", "model_not_found"),
        ({"n": 2}, 400, "n", "unsupported_parameter"),
        ({"logprobs": True}, 400, "logprobs", "unsupported_parameter"),
        ({"tools": [{"type": "function"}]}, 400, "tools.0.function", None),
        ({"tools": called({"type": "x"})}, 400, "tools[0].function.parameters", None),
        ({"tools": called({}), "stop": ["a"]}, 400, "tools", None),
        ({"tools": called({}, name="a b")}, 400, "tools.0.function.name", None),
        ({"tool_choice": "required"}, 400, "tool_choice", None),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, 400, "tool_choice", None),
        ({"response_format": {"type": "xml"}}, 400, "response_format", None),
        ({"response_format": formatted({"type": "x"})}, 400, "response_format", None),
        ({"response_format": {"type": "json_object"}, "stop": ["a"]}, 400, "response_format", None),
        ({"response_format": {"type": "json_object"}, "schema": {}}, 400, "schema", None),
        ({"regex": "(a"}, 400, "regex", None),
        ({"thinking": 0}, 400, "thinking", None),
        ({"thinking": "often"}, 400, "thinking", None),
        ({"presence_penalty": 2.5}, 400, "presence_penalty", None),
        ({"frequency_penalty": -2.5}, 400, "frequency_penalty", None),
        ({"surprise": 1}, 400, "surprise", "unknown_parameter"),
        ({"messages": []}, 400, "messages", None),
        ({"messages": [{"role": "user", "content": " "}]}, 400, "messages[0]", None),
        ({"messages": [{"role": "assistant", "content": "Yes."}]}, 400, "messages[0]", None),
        ({"messages": [{"role": "tool", "content": "Yes."}]}, 400, "messages[0]", None),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content[0]", None),
        ({"max_tokens": 0}, 400, "max_tokens", None),
        ({"temperature": float("nan")}, 400, "temperature", None),
        ({"temperature": -1}, 400, "temperature", None),
        ({"engine": "nothing"}, 400, "engine", None),
        ({"model": "two:ape", "engine": "pced"}, 400, "engine", None),
        ({"top_k_chunks": 0}, 400, "top_k_chunks", None),
        ({"top_k_chunks": "many"}, 400, "top_k_chunks", None),
        ({"top_k": -2}, 400, "top_k", None),
        ({"top_k": 4, "top_k_tokens": 5}, 400, "top_k", None),
        ({"top_k_tokens": 0}, 400, "top_k_tokens", None),
        ({"stop": [""]}, 400, "stop", None),
        ({"retrieval": "magic"}, 400, "retrieval", None),
        ({"retrieval": "dense"}, 422, "retrieval", None),
        ({"rerank": True}, 422, "rerank", None),
        ({"candidates": 0}, 400, "candidates", None),
        ({"max_tokens": -2}, 400, "max_tokens", None),
        ({"max_completion_tokens": 0}, 400, "max_completion_tokens", None),
        ({"where": ["nothing"]}, 400, "where", None),
        ({"where": ["source=none.md"]}, 400, "where", None),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_cannot_be_answered_is_told_why(chat, rag, change, status, param, code, stream):
    response = chat(**{"stream": stream, **change})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert code is None or error["code"] == code
    assert error["message"]
    assert error["type"]
    for words in ("--", "decoding:", "ragkv ls", "ragkv ingest", str(rag.folder.parent)):
        assert words not in error["message"]  # terms of the command line and of the machine
    if param in ("temperature", "engine", "top_k_chunks", "top_k", "where", "retrieval", "candidates", "stop"):
        assert param in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_documents_do_not_know_is_said_in_words(chat, stream):
    """A chat window would show an error as a broken server."""
    response = chat("Xyzzy?", stream=stream, footer=True)
    assert response.status_code == 200
    if stream:
        found = events(response)
        text, sources = sentence(found), found[-1]["sources"]
        assert found[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        result = response.json()
        text, sources = result["choices"][0]["message"]["content"], result["sources"]
        assert result["usage"]["completion_tokens"] == 0
    assert text == "No chunk of the index matches the question; ask with words that the documents use."
    assert sources == []


def test_an_index_without_documents_says_so_in_words(model_folder, app_of, call_on, tmp_path):
    body = {"model": "new", "messages": [{"role": "user", "content": QUESTION}]}
    with RagKV.create(tmp_path / "secret" / "new", model=str(model_folder), device="cpu") as rag:
        response = call_on(app_of(new=rag), "POST", "/v1/chat/completions", json=body)
    assert "no document yet" in response.json()["choices"][0]["message"]["content"]
    assert "secret" not in response.text


def test_top_k_is_about_tokens_as_for_other_servers(rag, chat):
    """vLLM's clients send values of 20 or 40."""
    asked = {"engine": "ape", "max_new_tokens": 6}
    drawn = rag.query(QUESTION, decoding={"top_k_tokens": 40, "seed": 7}, **asked)
    result = chat(engine="ape", top_k=40, seed=7).json()
    assert result["choices"][0]["message"]["content"] == drawn.text
    assert len(result["sources"]) == len(drawn.sources)
    for none in (0, -1):
        text = chat(engine="ape", top_k=none, seed=7).json()["choices"][0]["message"]["content"]
        assert text == rag.query(QUESTION, **asked).text
    assert len(chat(top_k_chunks=1).json()["sources"]) == 1


def test_a_length_of_minus_one_is_none(chat, rag):
    """For llama.cpp and LM Studio, -1 means no limit."""
    prompt = chat(max_tokens=1).json()["usage"]["prompt_tokens"]
    question = QUESTION + "?" * (rag.model.config.max_position_embeddings - prompt - 20)  # leaves little room
    expected = chat(question, max_tokens=None).json()["usage"]["completion_tokens"]
    assert 6 < expected < 120
    for name in ("max_tokens", "max_completion_tokens"):
        assert chat(question, **{"max_tokens": None, name: -1}).json()["usage"]["completion_tokens"] == expected


TASK = """### Task:
Generate a concise, 3-5 word title summarizing the chat history.
### Output:
JSON format: { "title": "your concise title here" }
### Chat History:
<chat_history>
USER: Which plants does Frau Blum water on Sundays?
ASSISTANT: The ferns. It says <chat_history> and </chat_history>.
</chat_history>"""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", [TASK, TASK + "\nBe brief."])
def test_a_task_about_the_conversation_is_answered_from_it(rag, chat, text, stream):
    """Open WebUI asks for titles, tags and follow-up questions like this."""
    before, _, rest = text.partition("<chat_history>\n")
    history, _, after = rest.rpartition("\n</chat_history>")
    given = rag.chunk(history, chunk_id="conversation")
    scored = ScoredChunk(chunk=given, source="", retrieval_score=0.0, rerank_score=None, score=0.5)
    expected = rag.query(f"{before}{after.lstrip()}".strip(), engine="full", chunks=[scored], max_new_tokens=6)
    response = chat(text, model="two:pced", footer=True, stream=stream)
    if stream:
        found = events(response)
        assert (sentence(found), found[-1]["sources"]) == (expected.text, [])
    else:
        result = response.json()
        assert result["choices"][0]["message"]["content"] == expected.text
        assert (result["sources"], result["choices"][0]["message"]["annotations"]) == ([], [])


def test_a_question_about_a_task_is_one_for_the_documents(chat):
    for text in ("What is the ### Task: of Halden Works?", "### Task:\nWho founded Halden Works? <context></context>"):
        assert chat(text).json()["sources"]


def test_what_no_error_should_be_says_nothing(chat, monkeypatch):
    monkeypatch.setattr(AnswerStream, "_find", lambda *_, **__: 1 / 0)
    response = chat()
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert "division" not in response.text


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["a1"]}}}}, "response_format"),
        ({"regex": "a2"}, "regex"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"title": "a3"}}}]},
            "tools[0].function.parameters",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_package_that_is_missing_is_named_with_its_command(chat, monkeypatch, asked, param, stream):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    response = chat(stream=stream, **asked)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (501, "missing_extra", param)
    assert "needs llguidance; run pip install -e '.[structured]'" in error["message"]
    assert response.headers["x-should-retry"] == "false"


def test_an_error_under_way_is_told_in_the_stream(chat, torn):
    response = chat(stream=True, max_tokens=30)
    error = events(response)[-1]["error"]
    assert error.pop("request_id") == response.headers["x-request-id"]
    assert error == {"message": "It broke.", "type": "retrieval_error", "param": None, "code": "nothing_retrieved"}


def test_a_request_leaves_once_what_waits_and_what_runs(limiter):
    request, other = (asyncio.run(limiter.admit("two")) for _ in range(2))
    for step, inside, waiting, running in ((request.runs, 2, 1, 1), (request.leave, 1, 1, 0), (other.leave, 0, 0, 0)):
        step()
        step()
        assert limiter.inside == inside
        for name, count in (("waiting", waiting), ("running", running)):
            assert f'ragkv:num_requests_{name}{{model_name="two"}} {count}.0'.encode() in limiter.text()


def test_too_many_requests_are_told_to_come_again(chat, limiter):
    trackers = [asyncio.run(limiter.admit("two")) for _ in range(8)]
    response = chat()
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    trackers[0].leave()
    assert chat().status_code == 200


@pytest.mark.parametrize(("stream", "after"), [(False, 0), (True, 0), (True, 2)])
def test_a_client_that_goes_away_frees_its_rows(app, rag, limiter, stream, after):
    """After this many ASGI messages of the response, or before the first."""
    body = {
        "model": "two", "stream": stream, "max_tokens": 2000, "messages": [{"role": "user", "content": QUESTION}],
    }  # fmt: skip

    async def ask():
        gone = asyncio.Event()
        scope, receive, send, pieces = posted("/v1/chat/completions", body, gone)

        async def sent(message):
            await send(message)
            if len(pieces) > after:
                gone.set()

        if not after:
            gone.set()
        await guarded(app)(scope, receive, sent)

    asyncio.run(ask())
    assert limiter.inside == 0
    for thread in threading.enumerate():
        if thread.name == "ragkv-answer":  # it ends at its next token
            thread.join()
    assert rag.index.runtime.idle


def test_models(call):
    assert [each["id"] for each in call("GET", "/v1/models").json()["data"]] == ["ragkv/two", "ragkv/two:plain"]
    listed = call("GET", "/v1/models?engines=true").json()["data"]
    assert listed[0]["id"] == "ragkv/two"
    assert "ragkv/two:pced" in [each["id"] for each in listed]
    assert call("GET", "/v1/models/ragkv/two:pced").json()["id"] == "ragkv/two:pced"
    assert call("GET", "/v1/models/two").json()["id"] == "ragkv/two"
    assert call("GET", "/v1/models/two:plain").json()["id"] == "ragkv/two:plain"
    assert call("GET", "/v1/models/three").status_code == 404


def test_health_and_readiness(app, call):
    assert call("GET", "/healthz").status_code == 200
    assert call("GET", "/readyz").status_code == 503
    app.state.ready = True
    assert call("GET", "/readyz").status_code == 200


def test_metrics_count(chat, call, rag):
    expected = rag.query(QUESTION, max_new_tokens=6)
    assert chat().status_code == 200
    text = call("GET", "/metrics").text
    for line in (
        f'ragkv:prefix_cache_queries_total{{model_name="two"}} {expected.kv.hits + expected.kv.misses}.0',
        f'ragkv:prefix_cache_hits_total{{model_name="two"}} {expected.kv.hits}.0',
        'ragkv:request_success_total{finished_reason="length",model_name="two"} 1.0',
        'ragkv:generation_tokens_total{model_name="two"} 6.0',
        'ragkv:num_requests_running{model_name="two"} 0.0',
        'ragkv:num_requests_waiting{model_name="two"} 0.0',
        'ragkv:time_to_first_token_seconds_count{model_name="two"} 1.0',
    ):
        assert line in text


def test_what_an_index_has_not_is_refused_by_name(call):
    for path, more in (("embeddings", {"input": "a"}), ("rerank", {"query": "a", "documents": ["b"]})):
        response = call("POST", f"/v1/{path}", json={"model": "two", **more})
        assert response.status_code == 400
        assert "two" in response.json()["error"]["message"]


def test_text_that_is_no_unicode_is_refused_everywhere(call, rag, monkeypatch):
    monkeypatch.setattr(type(rag.index.encoders), "embedder", type("Embedder", (), {"modes": frozenset({"dense"})})())
    monkeypatch.setattr(type(rag.index.encoders), "reranker", object())
    kind = {"content-type": "application/json"}
    for path, more in (
        ("embeddings", {"input": ["a", "\ud800"]}),
        ("rerank", {"query": "\ud800", "documents": ["a"]}),
        ("rerank", {"query": "a", "documents": ["\ud800"]}),
        ("chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}),
        (
            "chat/completions",
            {"messages": [{"role": role, "content": "\ud800a"} for role in ("user", "assistant", "user")]},
        ),
    ):
        response = call("POST", f"/v1/{path}", content=json.dumps({"model": "two", **more}), headers=kind)
        assert (response.status_code, "Unicode" in response.text) == (400, True), response.text


def test_embeddings_and_reranking(call, rag, monkeypatch):
    monkeypatch.setattr(type(rag.index.encoders), "embedder", Lengths())
    monkeypatch.setattr(type(rag.index.encoders), "reranker", Lengths())
    body = {"model": "two", "input": ["abc", "a"]}
    plain = call("POST", "/v1/embeddings", json=body).json()
    assert [item["embedding"] for item in plain["data"]] == [[3.0, 1.0], [1.0, 1.0]]
    packed = call("POST", "/v1/embeddings", json={**body, "encoding_format": "base64"}).json()["data"][0]["embedding"]
    assert struct.unpack("<2f", base64.b64decode(packed)) == (3.0, 1.0)
    assert call("POST", "/v1/embeddings", json={**body, "dimensions": 2}).json() == plain
    for wrong, param in (
        ({"dimensions": 1}, "dimensions"),
        ({"dimensions": "few"}, "dimensions"),
        ({"input": ""}, "input"),
        ({"input": ["abc", ""]}, "input"),
        ({"input": []}, "input"),
        ({"input": [1, 2]}, "input"),
        ({"input": [[1, 2], [3]]}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["a", 5]}, "input"),
        ({"input": None}, "input"),
    ):
        response = call("POST", "/v1/embeddings", json={**body, **wrong})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    body = {"model": "two", "query": "q", "documents": ["a", "abc", {"text": "ab"}], "top_n": 2}
    ranked = call("POST", "/v1/rerank", json=body).json()["results"]
    assert [item["index"] for item in ranked] == [1, 2]
    assert 0.8 < ranked[1]["relevance_score"] < ranked[0]["relevance_score"] < 1
    assert ranked[0]["document"] == {"text": "abc"}
    bare = call("POST", "/v1/rerank", json={**body, "return_documents": False}).json()["results"]
    assert bare == [{name: item[name] for name in ("index", "relevance_score")} for item in ranked]
    long = {**body, "documents": ["Halden Works was founded by Mira Oskel in 1907.", "a"], "max_tokens_per_doc": 1}
    first = rag.model.tokens.decode(rag.model.tokens.encode(long["documents"][0])[:1])
    reply = call("POST", "/v1/rerank", json=long).json()
    scores = {item["index"]: item["relevance_score"] for item in reply["results"]}
    assert reply["usage"]["prompt_tokens"] == sum(len(rag.model.tokens.encode(text)) for text in ("q", first, "a"))
    assert scores[0] == pytest.approx(1 / (1 + math.exp(-len(first))))
    refused = call("POST", "/v1/rerank", json={**body, "documents": ["a", {"txt": "b"}]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "documents.1")


def test_a_chunk_that_is_gone(call):
    assert call("GET", "/api/indexes/two/chunks/none").status_code == 404
    assert call("GET", "/api/indexes/three/chunks/none").status_code == 404
    assert call("GET", "/api/indexes/two/chunks/../../ragkv.toml").status_code == 404


UNREAD = "The body cannot be read as JSON: it is not UTF-8, is nested too deeply, or has too long a number."


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{bad", "The body is not valid JSON: Expecting property name enclosed in double quotes, at character 1."),
        ("[]", "The body is no JSON object; send a JSON object."),
        ("", "The body is empty; send a JSON object."),
        (b'"\xff"', UNREAD),
        ("[" * 100_000, UNREAD),
        ("9" * 5000, UNREAD),
    ],
)
def test_a_body_that_is_no_object_is_told_so(call, content, message):
    response = call("POST", "/v1/chat/completions", content=content, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["message"]) == (400, message)


def test_a_route_that_is_not_there_is_named(call):
    lost = call("POST", "/v1/assistants", json={})
    assert lost.status_code == 404
    assert lost.json()["error"]["message"] == "There is no POST /v1/assistants; GET /openapi.json lists all routes."
    other = call("GET", "/v1/chat/completions")
    assert (other.status_code, "There is no GET /v1/chat/completions" in other.text) == (405, True)
