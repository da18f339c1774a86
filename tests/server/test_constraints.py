"""Schemas, regexes and grammars of hostile requests: a 400 in one sentence, and the server lives on with its memory."""

import json
from pathlib import Path

import httpx
import pytest
from live import CHAT, PATIENCE, live

from ragkv import RagKV
from ragkv.decoding import Decoding
from ragkv.errors import ConfigError

pytestmark = pytest.mark.slow

QUESTION = "Who founded Halden Works?"
LINKS = {
    "items": lambda ref: {"type": "array", "items": ref},
    "properties": lambda ref: {"type": "object", "properties": {"x": ref}},
    "allOf": lambda ref: {"allOf": [ref, ref]},
    "anyOf": lambda ref: {"anyOf": [ref, {"type": "null"}]},
    "$ref": lambda ref: ref,
}


def chained(link, length=3000):
    """A schema of as many `$defs`, each of which refers to the next."""
    links = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "object"}}}


def rules(form, length=10_000):
    return "\n".join([f"start: {form('0')}", *(f'{form(i)}: {form(i + 1)} | "b"' for i in range(length))])


COSTLY = {
    "rules": {"grammar": rules(lambda i: f"r{i}") + '\nr10000: "a"'},
    "terminals": {"grammar": rules(lambda i: f"R{i}") + '\nR10000: "a"'},
    "intersection": {"grammar": "start: R\nR: " + " & ".join(f"/(?s:.*)a.{{{i}}}b.*/" for i in range(100, 200))},
    "multiples": {"schema": {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (9973, 9967, 9949)]}},
    "regex": {"regex": "x1(a{1000}){1000}"},
    "long": {"regex": "a" * ((1 << 20) + 1)},
}


@pytest.fixture(scope="module")
def chat(folder):
    with RagKV.open(folder, device="cpu") as rag, live({"two": rag}) as server:

        def chat(**body):
            asked = {"max_tokens": 4, "model": "two", "messages": [{"role": "user", "content": QUESTION}]}
            return httpx.post(server.root + CHAT, json=asked | body, timeout=PATIENCE)

        def check(**body):
            address = f"{server.root}/api/indexes/two/query/check"
            return httpx.post(address, json={"question": QUESTION, **body}, timeout=PATIENCE)

        chat.check = check

        yield chat
        assert chat().status_code == 200


def sentence(response):
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 500
    return error


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
def test_a_chain_of_references_is_refused(chat, link):
    schema = chained(link)
    json_schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert sentence(chat(response_format=json_schema))["param"] == "response_format"
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in "abc"]
    tools[1]["function"]["parameters"] = {**schema, "type": "object"}
    assert sentence(chat(tools=tools))["param"] == "tools[1].function.parameters"
    assert sentence(chat.check(schema=schema))["param"] == "schema"
    with pytest.raises(ConfigError, match="nested too deeply"):  # as in a ragkv.toml
        Decoding(schema=json.dumps(schema))


@pytest.mark.parametrize("options", COSTLY.values(), ids=COSTLY)
def test_what_costs_too_much_is_refused(chat, options):
    assert next(iter(options)) in sentence(chat(**options))["message"]


def test_refused_regexes_leave_no_memory_behind(chat):
    resident = []
    for i in range(12):
        sentence(chat(regex=f"x{i}(a{{1000}}){{1000}}"))
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) << 12)
    assert resident[-1] - resident[1] < 400 << 20


def test_numbers_have_at_most_as_many_digits_as_64_bits(chat):
    schema = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
    schema["additionalProperties"] = False
    call = f'start: "call " json\njson: %json {json.dumps(schema)}'
    for seed in range(5):
        options = {"temperature": 100, "max_tokens": 400, "seed": seed, "top_k_chunks": 1}
        for form in ({"schema": schema}, {"grammar": call}):
            text = chat(**form, **options).json()["choices"][0]["message"]["content"]
            assert abs(json.loads(text.removeprefix("call "))["count"]) < 10**18, text
