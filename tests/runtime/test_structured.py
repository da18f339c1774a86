"""Answers constrained by a schema, regex or grammar: every finished answer matches, for every engine."""

from __future__ import annotations

import copy
import json
import random
import re
from dataclasses import replace

import jsonschema_rs
import llguidance
import pytest
import regex
import torch
from asking import request
from nightly import NIGHTLY
from pydantic import BaseModel

from ragkv.config import PromptConfig
from ragkv.decoding import Decoding, schema_text
from ragkv.engines import make_engine
from ragkv.errors import ConfigError, UsageError
from ragkv.model.prompt import Prompt, Tokens, render
from ragkv.runtime import Generation, Runtime, Stream, runtime_of
from ragkv.runtime import decoding as decoding_module
from ragkv.types import TracedToken, field_sources

ENGINES = ("full", "single", "ippd", "block", "blend", "ape", "pced", "apb")

PROMPT = Prompt(prefix="", before_question="Q ", after_question=":", separator=".")


def asked(model, name):
    engine = make_engine(name, {})
    return engine, replace(request(model, engine), question="Who?", prompt=PROMPT)


def answer(model, name, decoding, steps=600):
    tokens = list(runtime_of(model).decode(*asked(model, name), Generation(max_new_tokens=steps, decoding=decoding)))
    return "".join(token.text for token in tokens), tokens[-1].finish_reason, [token.token_id for token in tokens]


def random_schema(draw: random.Random, depth: int = 2) -> dict:
    """A schema of the kinds that tools and clients send, with short values, so that a random model finishes."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    kind = draw.choice(kinds + ["object", "array", "anyOf", "ref"] * 2 * bool(depth))
    inner = lambda: random_schema(draw, depth - 1)  # noqa: E731
    match kind:
        case "string":
            return {"type": "string", "maxLength": draw.randint(1, 9)}
        case "integer" | "number":
            low = draw.randint(-999, 999)
            return {"type": kind, "minimum": low, "maximum": low + draw.randint(1, 5000), "multipleOf": 1}
        case "enum":
            return {"enum": draw.sample(["a", "ä\n", 'q"\\', "", 3, None, True, 1.5], draw.randint(1, 4))}
        case "const":
            return {"const": draw.choice([0, "x y", [1, {"b": 2}], {"a": None}])}
        case "pattern":
            return {
                "type": "string",
                "pattern": draw.choice(["^[a-c]{2,4}$", "^\\\\d{4}-\\\\d{2}$", "^(x|yz)+\\\\.?$"])[:60],
            }
        case "object":
            names = draw.sample(["a", "name", "ü", "a/b", "~"], draw.randint(1, 3))
            return {
                "type": "object",
                "properties": {name: inner() for name in names},
                "required": draw.sample(names, draw.randint(0, len(names))),
                "additionalProperties": False,
            }
        case "array":
            least = draw.randint(0, 2)
            return {"type": "array", "items": inner(), "minItems": least, "maxItems": least + draw.randint(0, 2)}
        case "anyOf":
            return {"anyOf": [inner(), inner()]}
        case "ref":
            return {"$ref": "#/$defs/it"}
    return {"type": kind}


SHARE = 200 if NIGHTLY else 8


@pytest.mark.parametrize(("place", "name"), list(enumerate(ENGINES)))
def test_every_finished_answer_is_valid(place, name, make_model):
    """Each engine gets other schemas."""
    model, finished = make_model("llama"), 0
    for seed in range(place * SHARE, (place + 1) * SHARE):
        schema = {"$defs": {"it": {"enum": ["l", "r"]}}, **random_schema(random.Random(seed))}
        found = Decoding(schema=schema_text(schema), temperature=1.0 if seed % 2 else None, seed=seed)
        text, reason, _ = answer(model, name, found)
        assert reason in ("stop", "length")
        if reason == "stop":
            finished += 1
            jsonschema_rs.validate(schema, json.loads(text))
    assert finished > 0.8 * SHARE


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_a_number_ends_where_a_text_of_digits_goes_on(kind, make_model):
    """With a model that would repeat zeros forever."""
    model = make_model("llama")
    schema = {"properties": {"text": {"type": "string", "pattern": "^.{40}$"}, "of": {"type": kind}}}
    schema |= {"type": "object", "required": ["text", "of"], "additionalProperties": False}
    zeros = model.tokens.encode("0")[-1:]

    def prefer(ids, scores):
        return scores.index_add(-1, torch.tensor(zeros), torch.tensor([[100.0]]))

    found = Decoding(schema=schema_text(schema))
    generation = Generation(max_new_tokens=600, decoding=found, processors=[prefer])
    tokens = list(runtime_of(model).decode(*asked(model, "full"), generation))
    assert tokens[-1].finish_reason == "stop"
    value = json.loads("".join(token.text for token in tokens))
    assert (len(value["text"]), value["text"].strip("0")) == (40, "")


PATTERN = r"(?:yes|no, because [a-z ]{3,12})\.|[0-9]{2,4}(?: km)?"


@pytest.mark.parametrize("name", ["full", "pced", "block"])
def test_the_choice_is_the_best_of_what_may_follow(name, make_model):
    """Slow reference: try the tokens by score, and take the first after which the text can still match."""
    model = make_model("llama")
    _, reason, ids = answer(model, name, Decoding(regex=PATTERN))
    stream, text, chosen = Stream(runtime_of(model), *asked(model, name)), "", []
    while True:
        for entry in stream.scores.sort(descending=True, stable=True).indices.tolist():
            longer = text + model.tokens.decode([entry])
            whole = regex.fullmatch(PATTERN, text) is not None
            if (entry in model.eos_ids and whole) or (
                longer != text and regex.fullmatch(PATTERN, longer, partial=True) is not None
            ):
                break
        chosen.append(entry)
        if entry in model.eos_ids or (regex.fullmatch(PATTERN, longer) and longer.endswith((".", "m"))):
            break
        text = longer
        stream.advance(entry)
    assert (ids, reason) == (chosen, "stop")


def test_ippd_and_a_crowd_answer_as_full_alone(make_model):
    model = make_model("llama")
    decodings = [Decoding(schema=schema_text(random_schema(random.Random(seed), 0))) for seed in range(6)]
    alone = [answer(model, "full", entry) for entry in decodings]
    for name in ("ippd", "full"):
        runtime = Runtime(model)
        given = [Generation(max_new_tokens=600, decoding=entry) for entry in decodings]
        jobs = [runtime.submit(*asked(model, name), entry) for entry in given]
        streams = [list(runtime.tokens(job)) for job in jobs]
        assert [[token.token_id for token in tokens] for tokens in streams] == [ids for _, _, ids in alone]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"schema": '{"type": "x"}'}, "schema cannot be used: Invalid type: x"),
        ({"schema": '{"type": '}, "schema cannot be used"),
        ({"schema": '{"not": {}}'}, 'Unimplemented keys: \\["not"\\]'),
        ({"schema": ""}, "must not be empty"),
        ({"regex": "(a"}, "regex cannot be used"),
        ({"grammar": "start: nothing"}, "grammar cannot be used"),
        ({"regex": "a", "schema": "{}"}, "schema and regex cannot be used together"),
        ({"regex": "a", "stop": ["b"]}, "regex and stop cannot be used together"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(wrong, message):
    with pytest.raises(ConfigError, match=message) as caught:
        Decoding(**wrong)
    assert "\n" not in str(caught.value)


def test_requests_with_one_constraint_share_what_is_compiled(make_model, monkeypatch):
    output, matcher = [], llguidance.LLMatcher

    def counted(tokens, constraint, **more):
        output.append(constraint)
        return matcher(tokens, constraint, **more)

    vars(counted).update({name: getattr(matcher, name) for name in dir(matcher) if name[0] in "gv"})  # static methods
    monkeypatch.setattr(llguidance, "LLMatcher", counted)
    monkeypatch.setattr(decoding_module, "_COPIES", 2)
    model = make_model("llama")
    first, second, third = (Decoding(regex=entry) for entry in ("[ab]{2}", "[cd]{2}", "[ef]{2}"))
    two = sum(entry.constraint.num_bytes for entry in (first, second)) + first.constraint.num_bytes // 2
    monkeypatch.setattr(decoding_module, "_COMPILED_BYTES", two)
    answers = [answer(model, "full", entry)[0] for entry in (first, first, second, first, second, third, first)]
    assert answers == [answer(model, "full", entry)[0] for entry in (first, first, second, first, second, third, first)]
    # compiled again after two answers, and after two other constraints
    assert len(output) < 14
    assert output[:5] == [entry.constraint.grammar for entry in (first, second, first, third, first)]


def test_a_grammar_that_is_too_much_ends_its_own_answer(make_model):
    model = make_model("llama")
    with pytest.raises(UsageError, match="too complex"):
        answer(model, "full", Decoding(regex="(a?){5000}a{5000}"))
    assert answer(model, "full", Decoding(regex="abc"))[0] == "abc"


class Work(BaseModel):
    founder: str
    year: int


def test_values_have_the_sources_that_won_their_tokens():
    text = [
        ('{"fou', 0),
        ('nder": "Mi', 1),
        ("ra", 1),
        ('", "years": [19', 0),
        ("07, 8], ", 2),
        ('"x/y": {"a": nu', None),
    ]
    text += [('ll, "b": tr', None), ("ue}}", 1)]
    trace = [TracedToken(token_id=i, text=part, source=source) for i, (part, source) in enumerate(text)]
    assert field_sources(trace) == {"/founder": 1, "/years/0": 0, "/years/1": 2, "/x~1y/b": 1}
    assert field_sources([TracedToken(token_id=1, text='{"a": 1}')]) == {}
    assert json.loads(schema_text(Work))["required"] == ["founder", "year"]


QWEN = "{{% for m in messages %}}[{{{{ m.role }}}}]\n{{{{ m.content }}}}\n{{% endfor %}}"
QWEN += "{{% if add_generation_prompt %}}[assistant]\n{}{{% endif %}}"
OFF = "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"


@pytest.fixture(params=["none", "switched", "always", "unsaid"])
def thinker(request, make_model, monkeypatch):
    """A model whose template has no thinking, a switch for it, always begins with it, or only removes it."""
    model, ends = make_model("llama"), {"switched": OFF, "always": "<think>\n", "unsaid": "{# </think> #}"}
    fast = copy.deepcopy(model.tokens._tokenizer)
    fast.chat_template = QWEN.format(ends.get(request.param, ""))
    monkeypatch.setattr(model, "tokens", Tokens(fast))
    monkeypatch.setattr(model, "name", request.param, raising=False)
    return model


def test_the_prompt_ends_within_a_thought_or_after_one(thinker):
    prompt = render(PromptConfig(), thinker.tokens)
    off, on = (
        thinker.tokens.decode(prompt.suffix_ids(thinker.tokens, "Who?", thinking=each)) for each in (False, True)
    )
    if thinker.name == "none":
        assert off == on
        assert thinker.tokens.thought is None
        return
    assert off.endswith("[assistant]\n<think>\n\n</think>\n\n" if thinker.name != "always" else "\n</think>\n\n")
    assert on.endswith("[assistant]\n<think>\n")
    assert (off.count("<think>"), off.count("</think>"), on.count("<think>")) == (1, 1, 1)


@pytest.mark.parametrize(("engine", "most"), [("full", "on"), ("pced", 1), ("ippd", 7)])
def test_a_thought_ends_and_the_answer_after_it_is_held_to_its_schema(thinker, engine, most):
    how = Decoding(thinking=most, regex="[ab]{3}", temperature=3.0, seed=1)
    generation = Generation(max_new_tokens=60, decoding=how)
    if thinker.name == "none":
        with pytest.raises(UsageError, match="no marks of a thought"):
            runtime_of(thinker).decode(*asked(thinker, engine), generation)
        return
    tokens = list(runtime_of(thinker).decode(*asked(thinker, engine), generation))
    thought, answer = ([token for token in tokens if token.thought == each] for each in (True, False))
    assert "</think>" not in "".join(token.text for token in thought)
    assert not {token.token_id for token in thought} & thinker.eos_ids
    if most == "on":  # a random model does not generate the mark
        assert (len(thought), tokens[-1].finish_reason, answer) == (60, "length", [])
        return
    assert len(thought) == most + len("\n</think>")
    assert thought[-1].finish_reason is None
    assert re.fullmatch("[ab]{3}", "".join(token.text for token in answer))
    assert tokens[-1].finish_reason == "stop"
