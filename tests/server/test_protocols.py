"""`/v1/completions`, `/v1/responses` and the model alone (`:plain`), as the `openai` package parses them."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Literal

import pytest
from live import live
from pydantic import BaseModel

QUESTION = "Who founded Halden Works?"
ASKED = {"model": "ragkv/two", "input": QUESTION, "max_output_tokens": 6}
MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def expected(mini):
    return mini.query(QUESTION, max_new_tokens=6)


@pytest.fixture(scope="module")
def client(mini, expected):
    with live({"two": mini}) as server:
        yield import_module("openai").OpenAI(base_url=server.url, api_key="none", max_retries=0)


def alone(rag, text, steps=6, *, chat=True):
    """What the model writes after `text`, by transformers' own `generate`."""
    import torch

    tokens = rag.model.tokens
    if chat:
        text = tokens.render([{"role": "user", "content": text}])
    ids = tokens.encode(text, control=True)
    if tokens.bos_id is not None and ids[:1] != (tokens.bos_id,):
        ids = (tokens.bos_id, *ids)
    with rag.model.plain() as plain:
        ends = sorted(rag.model.eos_ids)
        out = plain.generate(torch.tensor([ids]), max_new_tokens=steps, do_sample=False, eos_token_id=ends)
    return tokens.decode(out[0].tolist()).removeprefix(tokens.decode(ids))


def test_the_model_alone_reads_the_conversation_and_no_documents(client, mini):
    asked = {"model": "ragkv/two:plain", "messages": MESSAGES, "max_tokens": 6}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == alone(mini, QUESTION).strip()
    assert (whole.sources, whole.choices[0].message.annotations) == ([], [])
    tokens = mini.model.tokens
    assert whole.usage.prompt_tokens - len(tokens.encode(tokens.render(MESSAGES), control=True)) in (0, 1)
    pieces = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(each.choices[0].delta.content or "" for each in pieces) == whole.choices[0].message.content
    turns = [{"role": "system", "content": "Be brief."}, *MESSAGES, {"role": "assistant", "content": "Ann."}, *MESSAGES]
    longer = client.chat.completions.create(**asked | {"messages": turns})
    assert longer.usage.prompt_tokens > whole.usage.prompt_tokens
    again = client.chat.completions.create(**asked)  # nothing of the requests before
    assert again.choices == whole.choices


class Founder(BaseModel):
    place: Literal["Varn"]


def test_the_model_alone_answers_by_schemas_and_calls_tools(client):
    openai = import_module("openai")
    asked = {"model": "ragkv/two:plain", "messages": MESSAGES, "max_tokens": 120}
    parsed = client.chat.completions.parse(**asked, response_format=Founder).choices[0].message.parsed
    assert parsed == Founder(place="Varn")
    asked |= {"tools": [openai.pydantic_function_tool(Founder)], "parallel_tool_calls": False}
    message = client.chat.completions.parse(**asked, tool_choice="required").choices[0].message
    assert message.tool_calls[0].function.parsed_arguments == Founder(place="Varn")
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": ""}
    last = client.chat.completions.create(**asked | {"messages": [*MESSAGES, message, result], "tool_choice": "none"})
    assert last.choices[0].message.tool_calls is None


def test_a_completion_of_an_index_is_an_answer(client, expected):
    asked = {"model": "ragkv/two", "max_tokens": 6}
    whole = client.completions.create(**asked, prompt=[QUESTION, "Zzyzx?"], n=2)
    assert [each.index for each in whole.choices] == [0, 1, 2, 3]
    texts = [each.text for each in whole.choices]
    assert texts[:2] == [expected.text] * 2
    assert all("No chunk" in text for text in texts[2:])
    pieces = list(client.completions.create(**asked, prompt=QUESTION, stream=True, echo=True))
    assert "".join(each.choices[0].text for each in pieces) == QUESTION + expected.text
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_the_model_alone_continues_a_text(client, mini):
    text = "Halden Works was founded"
    asked = {"model": "ragkv/two:plain", "max_tokens": 6}
    ids = list(mini.model.tokens.encode(text))
    if mini.model.tokens.bos_id is not None:
        ids.insert(0, mini.model.tokens.bos_id)
    whole = client.completions.create(**asked, prompt=text)
    assert whole.choices[0].text == alone(mini, text, chat=False)
    assert client.completions.create(**asked, prompt=ids).choices[0].text == whole.choices[0].text
    hot = client.completions.create(**asked, prompt=text, n=2, temperature=1.5, seed=3, stream=True)
    texts = {0: "", 1: ""}
    for piece in hot:
        texts[piece.choices[0].index] += piece.choices[0].text
    one, other = (client.completions.create(**asked, prompt=text, temperature=1.5, seed=seed) for seed in (3, 4))
    assert texts == {0: one.choices[0].text, 1: other.choices[0].text}


def test_a_response_is_the_chats_answer(client, expected):
    whole = client.responses.create(**ASKED, instructions="")
    assert whole.output_text == expected.text
    assert whole.status == ("completed" if expected.finish_reason == "stop" else "incomplete")
    sources = [source.chunk_id for source in expected.sources]
    assert [each["chunk_id"] for each in whole.sources] == sources
    assert [each.url.rpartition("/")[2] for each in whole.output[0].content[0].annotations] == sources
    assert whole.usage.output_tokens == 6
    with client.responses.stream(**ASKED) as stream:
        events = list(stream)
    assert events[-1].response.output_text == expected.text
    assert [each.sequence_number for each in events] == list(range(len(events)))
    kinds = [each.type.removeprefix("response.") for each in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", whole.status]
    deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
    assert "".join(deltas) == expected.text
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}, *whole.output]
    plain, items = {"model": "ragkv/two:plain"}, [*items, {"role": "user", "content": QUESTION}]
    alone, after = (client.responses.create(**ASKED | plain | {"input": each}) for each in (QUESTION, items))
    assert after.usage.input_tokens > alone.usage.input_tokens


@pytest.mark.parametrize("model", ["ragkv/two", "ragkv/two:plain"])
def test_a_response_parses_and_calls(client, model):
    asked = {"model": model, "input": QUESTION, "max_output_tokens": 120}
    assert client.responses.parse(**asked, text_format=Founder).output_parsed == Founder(place="Varn")
    tool = {"type": "function", "name": "look", "parameters": Founder.model_json_schema(), "strict": True}
    asked |= {"tools": [tool], "parallel_tool_calls": False}
    result = client.responses.create(**asked, tool_choice="required")
    call = next(each for each in result.output if each.type == "function_call")
    assert (call.name, json.loads(call.arguments)) == ("look", {"place": "Varn"})
    with client.responses.stream(**asked, tool_choice={"type": "function", "name": "look"}) as stream:
        kinds = [event.type for event in stream]
        [streamed] = stream.get_final_response().output
    assert streamed.arguments == call.arguments
    assert "response.function_call_arguments.delta" in kinds
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "It is in Varn."}
    items = [{"role": "user", "content": QUESTION}, call, output]
    assert client.responses.create(**asked | {"input": items}, tool_choice="none").output[0].type == "message"


PLAIN, PROMPT = {"model": "two:plain"}, {"prompt": "Hello"}
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, PLAIN | {"messages": MESSAGES, "engine": "pced"}, "engine"),
        (CHAT, PLAIN | {"messages": MESSAGES, "where": ["source=a"]}, "where"),
        (CHAT, PLAIN | {"messages": MESSAGES, "top_k_chunks": 3}, "top_k_chunks"),
        (CHAT, PLAIN | {"messages": [{"role": "user", "content": "Halden " * 4000}]}, "messages[0]"),
        (CHAT, PLAIN | {"messages": [*MESSAGES, {"role": "assistant", "content": "x"}]}, "messages[1]"),
        (TEXT, {"prompt": [1, 2]}, "prompt"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, PLAIN | {"prompt": ""}, "prompt"),
        (TEXT, PLAIN | {"prompt": [10**9]}, "prompt"),
        (TEXT, PLAIN | {"prompt": "Halden " * 4000}, "prompt"),
        (TEXT, PROMPT | {"n": 40}, "n"),
        (TEXT, PROMPT | {"prompt": ["a"] * 33}, "prompt"),
        (TEXT, PROMPT | {"logprobs": 2}, "logprobs"),
        (TEXT, PROMPT | {"best_of": 3}, "best_of"),
        (TEXT, PROMPT | {"suffix": "x"}, "suffix"),
        (TEXT, PROMPT | {"surprise": 1}, "surprise"),
        (TEXT, PROMPT | {"messages": MESSAGES}, "messages"),
        (TEXT, PROMPT | {"temperature": -1}, "temperature"),
        (TEXT, PROMPT | {"top_k_chunks": "x"}, "top_k_chunks"),
        (RESPONSES, {"input": QUESTION, "previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES, {"input": QUESTION, "background": True}, "background"),
        (RESPONSES, {"input": QUESTION, "store": True}, "store"),
        (RESPONSES, {"input": QUESTION, "max_output_tokens": 0}, "max_output_tokens"),
        (RESPONSES, {"input": QUESTION, "max_tokens": 3}, "max_tokens"),
        (RESPONSES, {"input": QUESTION, "surprise": 3}, "surprise"),
        (RESPONSES, {"input": QUESTION, "text": {"format": {"type": "xml"}}}, "text.format"),
        (RESPONSES, {"input": " "}, "input"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        (RESPONSES, {"instructions": "x", "input": [{"role": "assistant", "content": "x"}]}, "input[0]"),
        (RESPONSES, {"input": QUESTION, "tools": [{"type": "web_search"}]}, "tools.0.type"),
        (RESPONSES, {"input": QUESTION, "tools": [{"type": "function", "name": "a", "parameters": {"type": "x"}}]},
         "tools[0].parameters"),
    ],
    ids=lambda each: str(each)[:60],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_cannot_be_answered_is_told_why(call, path, body, param, stream):
    response = call("POST", path, json={"model": "two", "stream": stream, **body})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    if "Halden " * 9 in str(body):
        assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", [TEXT, RESPONSES])
def test_an_error_under_way_is_told_in_the_stream(call, torn, path):
    asked = {"prompt": QUESTION} if path == TEXT else {"input": QUESTION}
    text = call("POST", path, json={"model": "two", "stream": True, **asked}).text
    assert "It broke." in text
    assert ("response.failed" in text) is (path == RESPONSES)
