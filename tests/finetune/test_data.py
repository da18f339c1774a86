"""Training examples: blocks, a row that gives the engines' logits, and passages of a world."""

from __future__ import annotations

import json

import pytest
import torch
from asking import teacher_forced

from ragkv.config import PromptConfig
from ragkv.errors import UsageError
from ragkv.finetune.block import NAME, RowMask, learnt
from ragkv.finetune.data import (
    IGNORED,
    SampledRows,
    collate,
    lay_out,
    parse_example,
    read_examples,
    tokenise,
)
from ragkv.index.conversation import Conversation, Turn

PROMPT = PromptConfig(system="Be.", context="D:\n")
LINE = {"prompt": "Who?", "blocks": ["Ann made it.", "Bo did not, he said.", "x"], "response": "Ann."}


def parts_of(model, **changes):
    return tokenise(model, [parse_example(json.dumps(LINE | changes), "f, line 1", PROMPT)])[0]


def outputs(model, columns, *names):
    """The model's outputs for a batch, of whose columns it also reads `names`."""
    model.module.set_attn_implementation(NAME)
    read = {name: columns[name] for name in ("input_ids", "position_ids", "logits_to_keep", *names)}
    try:
        with torch.no_grad():
            return model.module(**read, use_cache=False, ragkv_rows=RowMask(columns))
    finally:
        model.module.set_attn_implementation("ragkv")


def row_logits(model, rows):
    """Logits of the first row's last columns, with the other rows in the batch."""
    return outputs(model, collate(rows)).logits[0].float()


CASES = [
    ("llama", "bos", True),
    ("llama", "prefix", False),
    ("mistral-sliding", "prefix", True),
    ("mistral-sliding", "none", False),
    ("gemma2", "prefix", True),
    ("qwen2-moe-sliding", "prefix", True),  # windows only in the mask
    ("phi4-partial", "prefix", True),
    ("deepseek3", "prefix", True),
]


@pytest.mark.parametrize("family", dict.fromkeys(family for family, *_ in CASES))
def test_rows_over_prefixed_chunk_kv_are_what_the_engine_reads(make_model, family):
    model = make_model(family)
    parts = parts_of(model)
    longer = lay_out(parts_of(model, prompt="Who made it, and why?"), block=False, over="prefixed")
    block = lay_out(parts, block=True, over="prefixed")
    expected = teacher_forced(model, parts, "block", {"over": "prefixed"})
    torch.testing.assert_close(row_logits(model, [block, longer]), expected, atol=1e-4, rtol=0)
    assert lay_out(parts, block=False, over="prefixed") == lay_out(parts, block=False)
    assert not torch.allclose(row_logits(model, [lay_out(parts, block=True)]), expected, atol=1e-3)


@pytest.mark.parametrize("block", [False, True])
def test_a_packed_question_is_answered_as_if_asked_alone(make_model, block):
    model = make_model("mistral-sliding")
    first, second = parts_of(model), parts_of(model, prompt="Who made it, and why?", response="Ann Bo.")
    packed = first._replace(others=((second.suffix, second.response),))
    longer = lay_out(parts_of(model, prompt="Who? " * 30), block=False)  # to pad the row
    alone = [row_logits(model, [lay_out(one, block=block, over="prefixed")]) for one in (first, second)]
    row = lay_out(packed, block=block, over="prefixed")
    for rows in ([row], [row, longer]):
        found = row_logits(model, rows)  # from before the first answer token to the end of the row
        torch.testing.assert_close(found[: len(alone[0])], alone[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(found[-len(alone[1]) :], alone[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("family", "sink", "reencode"), CASES)
def test_rows_are_what_the_engines_read(make_model, family, sink, reencode):
    model = make_model(family)
    parts = parts_of(model)
    longer = lay_out(parts_of(model, prompt="Who made it, and why?"), block=False)  # to pad the row
    block = lay_out(parts, block=True, sink=sink, reencode=reencode)
    preset = "block" if reencode else "no-positions"
    expected = teacher_forced(model, parts, "block", {"sink": sink, "preset": preset})
    torch.testing.assert_close(row_logits(model, [block, longer]), expected, atol=1e-4, rtol=0)

    full = lay_out(parts, block=False, sink=sink, reencode=reencode)
    expected = teacher_forced(model, parts, "full")
    for rows in ([full], [full, longer]):  # without padding it is plainly causal
        assert collate(rows)["causal"] is (len(rows) == 1)
        torch.testing.assert_close(row_logits(model, rows), expected, atol=1e-4, rtol=0)
    if sink == "prefix" and reencode:
        assert not torch.allclose(row_logits(model, [block]), expected, atol=1e-2)


def test_only_the_answer_is_learnt(make_model):
    model = make_model("llama")
    parts = parts_of(model)
    columns = collate([lay_out(parts, block=True), lay_out(parts_of(model, response="Bo"), block=False)])
    learnt = [[label for label in row if label != IGNORED] for row in columns["labels"].tolist()]
    assert [model.tokens.decode(ids) for ids in learnt] == ["Ann.", "Bo"]
    assert [ids[-1] in model.eos_ids for ids in learnt] == [True, True]
    assert columns["labels"].shape[1] == columns["logits_to_keep"] == len(learnt[0]) + 1
    assert columns["input_ids"][:, -1].tolist() == columns["labels"][:, -1].tolist()


def test_the_loss_needs_no_logits_between_answers(make_model):
    model = make_model("llama")
    others = {"questions": [{"prompt": word, "response": word[:2]} for word in ("Ann?", "Who was it?", "Bo?")]}
    several = tokenise(model, [parse_example(json.dumps({"blocks": ["Ann."]} | others), "f, line 1", PROMPT)])[0]
    columns = collate([lay_out(several, block=True), lay_out(parts_of(model), block=False)])
    fewer = columns | learnt(columns)
    assert len(fewer["logits_to_keep"]) < columns["logits_to_keep"] * 2 / 3
    losses = [outputs(model, each, "labels").loss for each in (columns, fewer)]
    torch.testing.assert_close(losses[1], losses[0])


def test_a_template_without_a_system_role_is_answered_after_its_folded_prefix(make_model, monkeypatch):
    model = make_model("llama")
    monkeypatch.setattr(
        model.tokens._tokenizer,
        "chat_template",
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "<{{ m['role'] }}>{{ m['content'] | trim }}<eos>{% endfor %}{% if add_generation_prompt %}<model>{% endif %}",
    )
    parts = parts_of(model)
    whole = [*parts.prefix, *(i for chunk in parts.chunks for i in chunk), *parts.suffix, *parts.response]
    text = model.tokens._tokenizer.decode(whole)
    assert text == ("<user>Be.\n\nD:\nAnn made it.\n\nBo did not, he said.\n\nx\n\nQuestion: Who?<eos><model>Ann.<eos>")


def test_an_example_longer_than_the_model_is_named(make_model):
    with pytest.raises(UsageError, match=r"^f, line 1: \d+ tokens, but model 'llama' has 512 positions"):
        parts_of(make_model("llama"), blocks=["x" * 500])


def test_rows_are_drawn_by_their_number_alone(make_model):
    model = make_model("llama")
    parts = [parts_of(model, response=f"{number}.") for number in range(5)]
    options = {"full_share": 0.5, "sink": "prefix", "reencode": True}
    drawn = SampledRows(parts, 200, seed=3, **options)
    rows = [drawn[index] for index in range(len(drawn))]
    fresh = SampledRows(parts, 200, seed=3, **options)
    assert [fresh[index] for index in reversed(range(200))] == rows[::-1]
    assert {tuple(row.labels) for row in rows[5:10]} == {tuple(row.labels) for row in rows[:5]}
    assert 70 < sum(row.block for row in rows) < 130
    assert [SampledRows(parts, 9, seed=4, **options)[index].block for index in range(9)] != [r.block for r in rows[:9]]
    assert not any(SampledRows(parts, 9, seed=3, **options | {"full_share": 1.0})[i].block for i in range(9))
    assert all(SampledRows(parts, 9, seed=3, **options | {"full_share": 0.0})[i].block for i in range(9))


def test_rows_of_a_batch_are_of_similar_length_and_all_are_drawn(make_model):
    model = make_model("llama")
    parts = [parts_of(model, response="x" * (1 + number * 7 % 50)) for number in range(50)]
    options = {"full_share": 0.5, "sink": "prefix", "reencode": True, "seed": 3}
    alone, sorted_ = SampledRows(parts, 200, **options), SampledRows(parts, 200, batch=4, **options)
    rows, drawn = [alone[index] for index in range(200)], [sorted_[index] for index in range(200)]

    def padding(found):
        batches = [[len(row.tokens) for row in found[start : start + 4]] for start in range(0, 200, 4)]
        return sum(4 * max(lengths) - sum(lengths) for lengths in batches)

    assert sorted(drawn) == sorted(rows)
    assert padding(drawn) < padding(rows) / 4
    lengths = [len(row.tokens) for row in drawn[:64:4]]
    assert lengths not in (sorted(lengths), sorted(lengths, reverse=True))
    fresh = SampledRows(parts, 200, batch=4, **options)
    assert [fresh[index] for index in reversed(range(200))] == drawn[::-1]


SHORT = PromptConfig(system="Be short.")


def parsed(**line):
    return parse_example(json.dumps(line), "f, line 1", SHORT)


def chat(*contents, system=None, **more):
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    head = [] if system is None else [{"role": "system", "content": system}]
    return parsed(messages=head + messages, **more)


def test_a_chat_is_cut_at_its_blank_lines_and_rendered_as_it_is_written():
    example = chat("First.\n\nSecond\nline.\n \n\nWho?", "Ann.", system="Obey.")
    assert (example.blocks, example.question, example.response) == (("First.", "Second\nline."), "Who?", "Ann.")
    assert example.prompt == PromptConfig(system="Obey.", context="", question="{question}")


def test_questions_of_one_line_are_one_example(tmp_path):
    asked = [{"prompt": "Who?", "response": "Ann."}, {"prompt": "Where?", "response": "Varn."}]
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"blocks": ["One."], "questions": asked}) + "\n")
    [packed] = read_examples(path, SHORT)
    assert (packed.question, packed.response, packed.blocks) == ("Who?", "Ann.", ("One.",))
    assert packed.others == (("Where?", "Varn."),)


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
    "no form": ('{"text": "x"}', 'one of "messages", "questions" and "prompt"'),
    "two forms": ('{"prompt": "a", "messages": []}', 'one of "messages", "questions" and "prompt"'),
    "a question as text": ('{"questions": ["Who?"], "blocks": []}', '"questions" must be a list of objects'),
    "blank response": ('{"prompt": "a", "blocks": [], "response": " "}', '"response" must be a text'),
    "empty block": ('{"prompt": "a", "blocks": [""], "response": "y"}', '"blocks" must be a list'),
    "a text as messages": ('{"messages": "hi"}', "must be a list of objects"),
    "the user last": ('{"messages": [{"role": "user", "content": "x"}]}', "the assistant last"),
    "content in parts": (
        '{"messages": [{"role": "user", "content": []}, {"role": "assistant", "content": "x"}]}',
        '"content" must be a text',
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_named(tmp_path, name):
    line, message = BAD[name]
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{"prompt": "a", "blocks": [], "response": "b"}}\n\n{line}\n')
    with pytest.raises(UsageError) as error:
        read_examples(path, SHORT)
    assert str(error.value).startswith(f"{path}, line 3")
    assert message in str(error.value)


@pytest.mark.parametrize("content", [None, b"\n", b"\xff\xfe"])
def test_a_file_without_examples_is_refused(tmp_path, content):
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"cannot be read|holds no example"):
        read_examples(path, SHORT)
