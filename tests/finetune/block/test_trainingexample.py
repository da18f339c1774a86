"""Lines to learn from: what becomes a block, and one sentence that names file and line for what cannot be read."""

from __future__ import annotations

import json

import pytest

from ragkv.config import PromptConfig
from ragkv.errors import UsageError
from ragkv.finetune.block.trainingexample import parse_example, read_examples
from ragkv.index.conversation import Conversation, Turn

PROMPT = PromptConfig(system="Be short.")


def parsed(**line: object):
    return parse_example(json.dumps(line), "f, line 1", PROMPT)


def chat(*contents: str, system: str | None = None, **more: object):
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    head = [] if system is None else [{"role": "system", "content": system}]
    return parsed(messages=head + messages, **more)


def test_prompt_blocks_and_response_stand_in_the_words_of_the_index():
    example = parsed(prompt="Who?", blocks=["One.", "Two."], response="Ann.", id=7)
    assert (example.question, example.blocks, example.response) == ("Who?", ("One.", "Two."), "Ann.")
    assert example.prompt == PROMPT


def test_a_chat_is_cut_at_its_blank_lines_and_rendered_as_it_is_written():
    example = chat("First.\n\nSecond\nline.\n \n\nWho?", "Ann.", system="Obey.")
    assert (example.blocks, example.question, example.response) == (("First.", "Second\nline."), "Who?", "Ann.")
    assert example.prompt == PromptConfig(system="Obey.", context="", question="{question}")


def test_code_is_never_cut():
    code = "Look:\n```\na = 1\n\nb = 2\n\n```"
    assert chat(f"{code}\n\nWhat is b?", "2").blocks == (code,)
    assert chat("Just this?", "Yes.").blocks == ()


def test_documents_of_a_chat_are_its_blocks_and_its_text_stays_whole():
    example = chat("One\n\ntwo?", "Ann.", documents=["A.", "B.\n\nC."])
    assert (example.blocks, example.question) == (("A.", "B.\n\nC."), "One\n\ntwo?")


def test_earlier_turns_stand_where_a_conversation_puts_them():
    example = chat("Doc.\n\nWho?", "Ann.", "Where?", "Varn.")
    past = Conversation(example.prompt, len)
    past.turns.append(Turn(question="Who?", answer="Ann."))
    assert example.blocks == ("Doc.",)
    assert (example.question, example.response) == (past.prompt_text("Where?"), "Varn.")


BAD = {
    "no json": ("{", "not JSON"),
    "no object": ("[1]", 'either "messages" or "prompt"'),
    "neither form": ('{"text": "x"}', 'either "messages" or "prompt"'),
    "both forms": ('{"prompt": "a", "messages": []}', 'either "messages" or "prompt"'),
    "no response": ('{"prompt": "a", "blocks": []}', '"response" must be a text'),
    "blank response": ('{"prompt": "a", "blocks": [], "response": " "}', '"response" must be a text'),
    "blocks as text": ('{"prompt": "a", "blocks": "x", "response": "y"}', '"blocks" must be a list'),
    "empty block": ('{"prompt": "a", "blocks": [""], "response": "y"}', '"blocks" must be a list'),
    "no turns": ('{"messages": []}', "the assistant last"),
    "a text as messages": ('{"messages": "hi"}', "must be a list of objects"),
    "the user last": ('{"messages": [{"role": "user", "content": "x"}]}', "the assistant last"),
    "a tool": ('{"messages": [{"role": "tool", "content": "x"}, {"role": "assistant"}]}', "the assistant last"),
    "content in parts": (
        '{"messages": [{"role": "user", "content": []}, {"role": "assistant", "content": "x"}]}',
        '"content" must be a text',
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_named(tmp_path, name):
    line, said = BAD[name]
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{"prompt": "a", "blocks": [], "response": "b"}}\n\n{line}\n')
    with pytest.raises(UsageError) as error:
        read_examples(path, PROMPT)
    assert str(error.value).startswith(f"{path}, line 3")
    assert said in str(error.value)


@pytest.mark.parametrize("content", [None, b"\n", b"\xff\xfe"])
def test_a_file_without_examples_is_refused(tmp_path, content):
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"cannot be read|holds no example"):
        read_examples(path, PROMPT)
