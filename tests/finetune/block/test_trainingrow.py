"""A row gives the logits that the engines give: the same tokens, positions and visibility, in every kind of model."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from ragkv.config import PromptConfig
from ragkv.engines.base import ContextChunk, Request
from ragkv.engines.registry import make_engine
from ragkv.errors import UsageError
from ragkv.finetune.block.rowattention import NAME, RowMask
from ragkv.finetune.block.trainingexample import parse_example
from ragkv.finetune.block.trainingrow import IGNORED, Drawn, _response_ids, collate, lay_out, tokenise
from ragkv.model.prompt import closing
from ragkv.runtime import Stream, runtime_of

PROMPT = PromptConfig(system="Be.", context="D:\n")
LINE = {"prompt": "Who?", "blocks": ["Ann made it.", "Bo did not, he said.", "x"], "response": "Ann."}


def parts_of(model, **changes):
    return tokenise(model, [parse_example(json.dumps(LINE | changes), "f, line 1", PROMPT)])[0]


def row_logits(model, rows):
    """Those of the first row's last columns, the other rows beside it."""
    columns = collate(rows)
    mask = RowMask(
        positions=columns["position_ids"], **{name: columns[name] for name in ("segments", "asks", "block", "causal")}
    )
    model.module.set_attn_implementation(NAME)
    try:
        with torch.no_grad():
            found = model.module(
                input_ids=columns["input_ids"],
                position_ids=columns["position_ids"],
                logits_to_keep=columns["logits_to_keep"],
                use_cache=False,
                ragkv_rows=mask,
            ).logits[0]
    finally:
        model.module.set_attn_implementation("ragkv")
    return found.float()


def engine_logits(model, parts, name, **tuning):
    """Teacher-forced: the scores before each token of the answer, and after the last."""
    engine = make_engine(name, {name: tuning})
    chunks = [list(ids) for ids in parts.chunks]
    [prefix], kvs = model.encode([list(parts.prefix)]), model.encode(chunks)
    request = Request(
        prefix_ids=parts.prefix,
        prefix=prefix,
        chunks=tuple(ContextChunk(token_ids=tuple(i), score=0.5, kv=kv) for i, kv in zip(chunks, kvs, strict=True)),
        suffix_ids=tuple(parts.suffix),
    )
    stream = Stream(runtime_of(model), engine, request)
    scores = [stream.scores]
    for token in parts.response:
        stream.advance(token)
        scores.append(stream.scores)
    return torch.stack(scores)


CASES = [
    ("llama", "prefix", True),
    ("llama", "bos", True),
    ("llama", "none", True),
    ("llama", "prefix", False),
    ("qwen2", "prefix", True),
    ("mistral-sliding", "prefix", True),
    ("mistral-sliding", "none", False),
    ("gemma2", "prefix", True),
    ("qwen2-moe-sliding", "prefix", True),  # windows in the mask alone
    ("phimoe-sliding", "none", True),
    ("gemma3", "prefix", True),
    ("phi4-partial", "prefix", True),
    ("cohere2", "bos", True),
]


@pytest.mark.parametrize(("family", "sink", "reencode"), CASES)
def test_rows_are_what_the_engines_read(make_model, family, sink, reencode):
    model = make_model(family)
    parts = parts_of(model)
    longer = lay_out(parts_of(model, prompt="Who made it, and why?"), block=False)  # so that the row is padded
    block = lay_out(parts, block=True, sink=sink, reencode=reencode)
    expected = engine_logits(model, parts, "block", sink=sink, preset="block" if reencode else "no-positions")
    torch.testing.assert_close(row_logits(model, [block, longer]), expected, atol=1e-4, rtol=0)

    full = lay_out(parts, block=False, sink=sink, reencode=reencode)
    expected = engine_logits(model, parts, "full")
    for rows in ([full], [full, longer]):  # alone it is plainly causal
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


class Template:
    """A stand-in for `Tokens` that renders as a template would."""

    def __init__(self, header: str, answer: str | None) -> None:
        self.header, self.answer = header, answer

    def render(self, messages, *, header=True):
        if self.answer is None:
            return None
        asked = f"U:{messages[0]['content']}"
        return asked + self.header if header else asked + self.answer.format(messages[1]["content"])


@pytest.mark.parametrize(
    ("header", "answer", "expected"),
    [
        ("A:", "A:{}<end>\n", ("", "<end>\n")),
        ("[/I]", "[/I] {}</s>", (" ", "</s>")),  # Mistral's own template puts a space
        ("A:<think></think>", "A:{}<end>", ("", "<end>")),  # the header is written otherwise
        ("", None, (" ", "")),  # a base model
    ],
)
def test_an_answer_ends_as_the_template_ends_it(header, answer, expected):
    assert closing(Template(header, answer)) == expected


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
    drawn = Drawn(parts, 200, seed=3, **options)
    rows = [drawn[index] for index in range(len(drawn))]
    fresh = Drawn(parts, 200, seed=3, **options)
    assert [fresh[index] for index in reversed(range(200))] == rows[::-1]
    assert {tuple(row.labels) for row in rows[5:10]} == {tuple(row.labels) for row in rows[:5]}
    assert 70 < sum(row.block for row in rows) < 130
    assert [Drawn(parts, 9, seed=4, **options)[index].block for index in range(9)] != [r.block for r in rows[:9]]
    assert not any(Drawn(parts, 9, seed=3, **options | {"full_share": 1.0})[i].block for i in range(9))
    assert all(Drawn(parts, 9, seed=3, **options | {"full_share": 0.0})[i].block for i in range(9))


def test_rows_without_a_bos_are_those_with_one_but_for_it(make_model):
    model = make_model("llama")
    chat = {"messages": [{"role": "user", "content": "A.\n\nWho?"}, {"role": "assistant", "content": "Ann."}]}
    for line in (LINE, chat):
        for bos in ("auto", "none"):
            example = parse_example(json.dumps(line), "f, line 1", replace(PROMPT, bos=bos))
            [parts] = tokenise(model, [example])
            whole = [*parts.prefix, *(i for chunk in parts.chunks for i in chunk), *parts.suffix]
            assert whole.count(0) == (bos == "auto")


def test_only_the_template_writes_control_tokens_before_an_answer(make_model):
    """A header that goes on when the answer is known (`<think></think>`) is the template's, the answer is not."""
    tokens = make_model("llama").tokens
    ids = _response_ids(tokens, "<pad>\n", " Ann<eos>")
    assert [i for i in ids if i < 3] == [2]
    assert tokens.decode(ids) == "\n Ann<eos>"
    assert tokens.decode(_response_ids(tokens, " ", " Ann")) == " Ann"
