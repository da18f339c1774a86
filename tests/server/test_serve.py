"""`ragkv serve` as a user starts it, asked by clients of OpenAI's protocol over a socket."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import pytest

from ragkv.server.key import add_key

pytestmark = pytest.mark.slow

openai = pytest.importorskip("openai")
COMMAND = [sys.executable, "-c", "from ragkv.cli.main import main; main()"]
ASKED = {"messages": [{"role": "user", "content": "Who founded Halden Works?"}], "max_tokens": 6}


class Serving:
    """A running server."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            [*COMMAND, "serve", "--port", "0", "--device", "cpu", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.line = self.process.stdout.readline()
        assert self.line, self.process.stderr.read()
        self.url = self.line.split()[-1]

    def stop(self, number=signal.SIGTERM):
        """Its exit code and what it said on stderr."""
        self.process.send_signal(number)
        _, said = self.process.communicate()
        return self.process.returncode, said


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return tmp_path_factory.mktemp("keys") / "keys"


@pytest.fixture(scope="module")
def key(keys):
    return add_key(keys, "ann")


@pytest.fixture(scope="module")
def serving(folder, keys, key):
    server = Serving("--index", f"two={folder}", "--index", f"again={folder}", "--keys", keys)
    yield server
    code, said = server.stop()
    assert (code, "Traceback" in said) == (0, False), said


@pytest.fixture
def client(serving, key):
    return openai.OpenAI(base_url=serving.url, api_key=key, max_retries=0)


def test_openai_asks(client, rag):
    expected = rag.query("Who founded Halden Works?", max_new_tokens=6)
    told = client.chat.completions.create(model="ragkv/two", **ASKED)
    assert told.choices[0].message.content == expected.text
    assert told.choices[0].message.annotations[0].url_citation.title
    assert told.sources[0]["chunk_id"] == expected.sources[0].chunk_id
    assert told.usage.prompt_tokens > told.usage.prompt_tokens_details.cached_tokens > 0


def test_openai_streams(client, rag):
    expected = rag.query("Who founded Halden Works?", engine="pced", max_new_tokens=6)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(model="ragkv/again:pced", **ASKED, **options))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected.text
    assert chunks[-1].usage.completion_tokens == 6


def test_openai_asks_many_at_once(serving, key, rag):
    engines = ["full", "ape", "block", "pced"] * 2
    expected = [rag.query("Who founded Halden Works?", engine=engine, max_new_tokens=6).text for engine in engines]

    async def ask():
        async with openai.AsyncOpenAI(base_url=serving.url, api_key=key, max_retries=0) as asker:
            asked = (asker.chat.completions.create(model=f"ragkv/two:{engine}", **ASKED) for engine in engines)
            return [told.choices[0].message.content for told in await asyncio.gather(*asked)]

    assert asyncio.run(ask()) == expected


def test_openai_is_told_errors(client, serving):
    with pytest.raises(openai.NotFoundError, match="There is no model"):
        client.chat.completions.create(model="gpt-4", **ASKED)
    with pytest.raises(openai.BadRequestError, match="not supported"):
        client.chat.completions.create(model="ragkv/two", n=2, **ASKED)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=serving.url, api_key="no").models.list()
    assert [model.id for model in client.models.list()][:2] == ["ragkv/two", "ragkv/two:all"]


def test_interrupted_it_ends_with_0(folder):
    code, said = Serving("--index", folder).stop(signal.SIGINT)
    assert code == 0
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--host", "0.0.0.0"], "--keys"),
        (["--index", "none"], "no index"),
        (["--new-key", "ann"], "--keys FILE"),
        (["--keys", "/dev/null"], "cannot be read"),
    ],
)
def test_what_cannot_be_served_is_refused(folder, arguments, says):
    command = [*COMMAND, "serve", "--index", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
