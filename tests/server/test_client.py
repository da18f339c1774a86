"""Unmodified third-party clients against one live server.

LiteLLM refuses the huggingface_hub that transformers uses here, and LlamaIndex' clients refuse the newest `openai`. So
they are installed in a separate environment (`make clients`), in which a script asks as their users would.
"""

import asyncio
import json
import runpy
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Literal

import pytest
from live import PATIENCE, live
from pydantic import BaseModel

from ragkv.server.settings import Keys

pytestmark = pytest.mark.slow

PYTHON = Path(sys.prefix) / "clients" / "bin" / "python"
SCRIPTS = Path(__file__).parent / "clients"
QUESTION = "Who founded Halden Works?"
ASKED = {"model": "ragkv/two", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 6}


@pytest.fixture(scope="module")
def server(mini, key):
    with live({"two": mini}, keys=Keys.read(key[0])) as serving:
        yield serving


@pytest.fixture(scope="module")
def expected(mini):
    """The answer of a single query, computed before the server starts."""
    return mini.query(QUESTION, max_new_tokens=6)


@pytest.fixture(scope="module")
def seen(expected, server, key):
    """The results of the other clients."""
    if not PYTHON.exists():
        pytest.skip("the other clients are not installed: make clients")
    names = ["openai", "litellm", "llama_index", "langchain"]
    command = [PYTHON, SCRIPTS / "ask.py", server.url, key[1], *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    result = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(names, result, strict=True))


@pytest.fixture
def newest(expected, server, key, monkeypatch, capsys):
    """The results of the `openai` package installed here."""
    monkeypatch.setattr(sys, "argv", ["ask.py", server.url, key[1]])
    monkeypatch.syspath_prepend(SCRIPTS)
    runpy.run_path(str(SCRIPTS / "ask_openai.py"))
    monkeypatch.delitem(sys.modules, "asked", raising=False)
    return json.loads(capsys.readouterr().out)


def check(seen, expected):
    assert "failed" not in seen, seen["failed"]
    assert seen["text"] == seen["streamed"] == expected.text
    assert seen["usage"] == 6
    sources = [source.chunk_id for source in expected.sources]
    if "sources" in seen:
        assert seen["sources"] == sources
        assert [url.rpartition("/")[2] for url in seen["annotations"]] == sources
    if "footer" in seen:
        text, _, footer = seen["footer"].partition("\n\nSources:\n")
        assert text == expected.text
        assert all(source in line for source, line in zip(sources, footer.splitlines(), strict=True))


@pytest.mark.parametrize("version", ["newest", "second newest"])
def test_openai(request, version, expected, mini):
    result = request.getfixturevalue("newest") if version == "newest" else request.getfixturevalue("seen")["openai"]
    check(result, expected)
    assert result["streamed_sources"] == result["sources"]
    assert result["models"] == ["ragkv/two", "ragkv/two:plain"]
    vector = mini.index.encoders.embedder.embed_documents(["Halden Works"]).dense[0]
    assert result["embedding"] == pytest.approx(vector.tolist(), abs=1e-6)


def test_litellm(seen, expected, mini):
    result = seen["litellm"]
    check(result, expected)
    assert result["refused"] == 404
    assert len(result["embedding"]) == mini.index.encoders.embedder.embed_documents(["a"]).dense.shape[1]


def test_llama_index(seen, expected):
    result = seen["llama_index"]
    check(result, expected)
    assert result["completed"] == expected.text
    assert (result["structured"], result["agent"], result["looked"]) == ("Varn", True, ["Varn"])


def test_langchain(seen, expected):
    """It drops fields that OpenAI's protocol lacks, including annotations, so its users ask for the footer."""
    result = seen["langchain"]
    check(result, expected)
    assert result["streamed_usage"] == 6
    assert result["structured"] == ["Varn", "Varn"]
    assert result["calls"] == [[["look", {"place": "Varn"}]]] * 2
    assert result["after"]
    assert {"annotations", "sources"}.isdisjoint(result["kept"])


@pytest.fixture(scope="module")
def openai():
    return import_module("openai")  # not at collection: the import takes a second


@pytest.fixture
def client(openai, expected, server, key):
    return openai.OpenAI(base_url=server.url, api_key=key[1], max_retries=0)


class Founder(BaseModel):
    place: Literal["Varn", 'a"]}']
    year: Literal[1907, 7]


@pytest.mark.parametrize("engine", ["full", "pced"])
def test_openai_parses_what_it_asks_for(openai, client, engine):
    asked = {**ASKED, "model": f"ragkv/two:{engine}", "max_tokens": 300}
    result = client.chat.completions.parse(**asked, response_format=Founder)
    assert isinstance(result.choices[0].message.parsed, Founder)
    with client.chat.completions.stream(**asked, response_format=Founder) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == result.choices[0].message.parsed
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**asked | {"max_tokens": 2}, response_format=Founder)


@pytest.mark.parametrize("question", [QUESTION, "Zzyzx?"])  # also if no document matches
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "Founder"}}])
def test_openai_calls_tools_and_gives_their_results(openai, client, choice, question):
    tools = [openai.pydantic_function_tool(Founder), openai.pydantic_function_tool(Founder, name="other")]
    before = [{"role": "user", "content": question}]
    asked = {**ASKED, "max_tokens": 120, "tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    result = client.chat.completions.parse(**asked | {"messages": before}).choices[0]
    with client.chat.completions.stream(**asked | {"messages": before}) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == result.finish_reason
    assert (streamed.message.content or "") == (result.message.content or "")
    if choice == "auto":
        return
    [call], [again] = result.message.tool_calls, streamed.message.tool_calls
    assert result.finish_reason == "tool_calls"
    assert isinstance(call.function.parsed_arguments, Founder)
    assert (call.function.name, call.function.arguments) == (again.function.name, again.function.arguments)
    told = [result.message, {"role": "tool", "tool_call_id": call.id, "content": "It is in Varn."}]
    last = client.chat.completions.create(**asked | {"messages": [*before, *told], "tool_choice": "none"})
    assert last.choices[0].message.tool_calls is None


def test_openai_raises_what_goes_wrong_under_way(openai, client, torn):
    pieces = []
    stream = client.chat.completions.create(**ASKED, stream=True)
    with pytest.raises(openai.APIError, match=r"It broke\.") as caught:
        pieces.extend(chunk.choices[0].delta.content for chunk in stream)
    assert caught.value.type == "retrieval_error"
    assert any(pieces)


def test_openai_in_an_event_loop(openai, expected, server, key, stopped):
    async def ask():
        async with openai.AsyncOpenAI(base_url=server.url, api_key=key[1], max_retries=0) as asker:
            stream = await asker.chat.completions.create(**ASKED, stream=True)
            pieces = []
            async for chunk in stream:
                pieces.append(chunk.choices[0].delta.content or "")
                if any(pieces):
                    stopped.set()  # it arrived while the answer was still being generated
            return "".join(pieces)

    assert asyncio.run(ask()) == expected.text


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_curl_shows_what_there_is_before_the_end(expected, server, key, stopped):
    body = json.dumps({**ASKED, "stream": True})
    command = ["curl", "-sN", f"{server.url}/chat/completions", "-H", f"authorization: Bearer {key[1]}"]
    with subprocess.Popen(
        [*command, "-H", "content-type: application/json", "-d", body], stdout=subprocess.PIPE, text=True
    ) as process:
        lines = []
        for line in process.stdout:
            lines.append(line.strip())
            if not stopped.is_set() and (message := result(lines)):
                assert expected.text.startswith(message)
                assert message != expected.text
                stopped.set()
    assert process.returncode == 0
    assert result(lines) == expected.text
    assert lines[-2:] == ["data: [DONE]", ""]


def result(lines):
    """The text in the lines of a stream."""
    found = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return "".join(choice["delta"].get("content", "") for each in found for choice in each["choices"])
