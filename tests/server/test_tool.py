"""The index as MCP tools, called by the official client: in memory, over stdin and stdout, and over HTTP."""

import asyncio
import json
import signal
import sys
from types import SimpleNamespace

import httpx
import pytest
from clichild import CliChild
from live import live
from mcp import Client, StdioServerParameters
from script import written

from ragkv import RagKV
from ragkv.server.local import LocalClient
from ragkv.server.mcp import make_tools

QUESTION = "Who founded Halden Works?"
COMMAND = [sys.executable, "-c", "from ragkv.cli.main import main; main()"]


def asked(server, *calls):
    """The results of these calls, `(tool, arguments)`, and the list of tools."""

    async def ask():
        async with Client(server) as client:
            tools = (await client.list_tools()).tools
            return [await client.call_tool(name, arguments) for name, arguments in calls], tools

    return asyncio.run(ask())


@pytest.fixture
def tools(rag):
    return make_tools(rag, "two")


def test_the_tools_read_and_say_what_they_give(tools):
    _, found = asked(tools)
    assert {tool.name for tool in found} == {"search", "ask", "show", "list_documents"}
    for tool in found:
        assert tool.annotations.read_only_hint
        assert tool.description
        assert tool.output_schema["properties"]


def test_their_results_are_those_of_the_index(tools, rag):
    answer = rag.query(QUESTION, engine="ape", max_new_tokens=6)
    (searched, payload, listed), _ = asked(
        tools,
        ("search", {"question": QUESTION, "top_k": 1}),
        ("ask", {"question": QUESTION, "engine": "ape", "max_new_tokens": 6}),
        ("list_documents", {"limit": 1}),
    )
    [passage] = searched.structured_content["passages"]
    assert passage["chunk_id"] == rag.retrieve(QUESTION, top_k=1)[0].chunk.chunk_id
    assert payload.structured_content["answer"] == answer.text
    assert [each["chunk_id"] for each in payload.structured_content["sources"]] == [s.chunk_id for s in answer.sources]
    assert len(listed.structured_content["documents"]) == 1
    (rest,), _ = asked(tools, ("list_documents", {"after": listed.structured_content["after"]}))
    assert (len(rest.structured_content["documents"]), rest.structured_content["after"]) == (1, None)
    document = listed.structured_content["documents"][0]["document_id"]
    (shown,), _ = asked(tools, ("show", {"chunk": f"{document}:0"}))
    assert shown.structured_content["document_id"] == document
    assert shown.structured_content["text"]


def test_the_model_may_write_further_queries(tools, rag, monkeypatch):
    question, query = "The steps here are those of Works", "Who founded Bolt Ltd?"
    written(monkeypatch, ["block"], {"steps here": [query, "Yes."]})
    asking = {"question": question, "engine": "block", "top_k": 1, "steps": 2, "system": "Be brief."}
    (payload,), _ = asked(tools, ("ask", asking))
    found = payload.structured_content
    assert (found["queries"], found["answer"]) == ([f"{question} {query}"], "Yes.")


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("ask", {"question": QUESTION, "steps": 9}, "less than or equal to 8"),
        ("ask", {"question": " "}, "empty"),
        ("ask", {"question": QUESTION, "engine": "none"}, "none"),
        ("ask", {"question": QUESTION, "where": ["source=none"]}, "No document matches"),
        ("search", {"question": QUESTION, "where": ["source"]}, "where takes FIELD=PATTERN"),
        ("search", {"question": QUESTION, "top_k": 0}, "greater than or equal to 1"),
        ("show", {"chunk": "none"}, "No chunk"),
        ("show", {"chunk": "a\0:0"}, "No document"),
        ("list_documents", {"pattern": "a\0"}, "No document"),
        ("show", {}, "required"),
    ],
)
def test_what_cannot_be_done_is_said(tools, name, arguments, says):
    (result,), _ = asked(tools, (name, arguments))
    assert result.is_error
    assert says in result.content[0].text
    assert "--" not in result.content[0].text


@pytest.mark.slow
def test_over_stdin_and_stdout(folder, rag):
    """Line by line: stdout has nothing else, and the end of stdin ends the process."""
    server = CliChild("mcp", "--index", folder, "--device", "cpu")
    client = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    call = {"name": "ask", "arguments": {"question": QUESTION, "max_new_tokens": 6}}
    server.say(json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": client}))
    assert json.loads(server.line())["result"]["serverInfo"]["name"] == f"ragkv {folder.name}"
    server.say(json.dumps({"jsonrpc": "2.0", "method": "notifications/initialized"}))
    server.say(json.dumps({"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call}))
    payload = json.loads(server.line())
    assert payload["id"] == 2
    assert payload["result"]["structuredContent"]["answer"] == rag.query(QUESTION, max_new_tokens=6).text
    code, rest, message = server.end()
    assert (code, rest, "Traceback" in message) == (0, "", False), message


def test_a_server_that_is_up_does_the_work(folder, rag, monkeypatch):
    """The server has opened the index; read-only tools give the same results as without a server."""
    calls = [
        ("search", {"question": QUESTION, "top_k": 1, "where": ["source=*.md"]}),
        ("ask", {"question": QUESTION, "engine": "pced", "max_new_tokens": 6}),
        ("list_documents", {"limit": 1}),
        ("list_documents", {"pattern": "*halden.md"}),
        ("show", {"chunk": rag.retrieve(QUESTION, top_k=1)[0].chunk.chunk_id}),
        ("show", {"chunk": "none"}),
        ("ask", {"question": QUESTION, "engine": "nothing"}),
        ("ask", {"question": QUESTION, "where": ["source=nothing"]}),
    ]
    expected, _ = asked(make_tools(rag, "two"), *calls)
    with RagKV.open(folder, device="cpu") as opened, live({"two": opened}, resident=True):
        client = LocalClient(folder, {"device": "cpu"})
        looked_at = SimpleNamespace(store=rag.store, list_documents=rag.list_documents)
        payload, _ = asked(make_tools(looked_at, "two", client), *calls)
    assert [each.is_error for each in payload] == [False] * 5 + [True] * 3
    for one, other in zip(payload, expected, strict=True):
        assert one.structured_content == other.structured_content
        assert one.content == other.content
    (alone,), _ = asked(make_tools(rag, "two", client), calls[0])  # the server is gone
    assert alone.structured_content == expected[0].structured_content


@pytest.mark.slow
@pytest.mark.nightly
def test_the_official_client_starts_it(folder, rag):
    arguments = [*COMMAND[1:], "mcp", "--index", str(folder), "--device", "cpu"]
    server = StdioServerParameters(command=COMMAND[0], args=arguments)
    (payload,), _ = asked(server, ("ask", {"question": QUESTION, "max_new_tokens": 6}))
    assert payload.structured_content["answer"] == rag.query(QUESTION, max_new_tokens=6).text


@pytest.mark.slow
def test_over_http(folder, rag):
    server = CliChild("mcp", "--http", "--port", 0, "--index", folder, "--device", "cpu")
    try:
        url = server.line().split()[-1]
        (payload,), _ = asked(url, ("ask", {"question": QUESTION, "max_new_tokens": 6}))
        for headers in ({}, {"last-event-id": "1"}):
            accepts = {"accept": "application/json, text/event-stream", **headers}
            assert httpx.get(url, headers=accepts, timeout=600).status_code == 405
            ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
            assert httpx.post(url, json=ping, headers=accepts, timeout=600).status_code == 200
            for origin in ("http://evil.example", "null"):
                assert httpx.post(url, json=ping, headers={**accepts, "origin": origin}, timeout=600).status_code == 403
    finally:
        code, _, message = server.end(signal.SIGHUP)  # as when its terminal closes
    assert payload.structured_content["answer"] == rag.query(QUESTION, max_new_tokens=6).text
    assert (code, "Traceback" in message) == (0, False), message
