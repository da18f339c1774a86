"""Tool calls as chat templates write them: format inferred from the template, enforced by a grammar, parsed as
streamed.
"""

import copy
from functools import cache
from types import SimpleNamespace

import pytest
from llguidance import LLMatcher, LLTokenizer

from ragkv.errors import UsageError
from ragkv.model.prompt import Prompt, Tokens
from ragkv.model.tools import ToolCallParser, tool_format, tool_tail

HEAD = "{% for m in messages %}{% if m.role == 'tool' %}<|turn|>tool\n{{ m.content }}<eos>\n{% else %}"
HEAD += "<|turn|>{{ m.role }}\n"
TAIL = "<eos>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
SHOWN = (
    "{% if tools and m.role == 'system' %}\n\n# Tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
)
NAMED = '{"name": "{{ c.function.name }}", '
CALLS = "{{ m.content }}" + SHOWN + "{% for c in m.tool_calls or [] %}"
TEMPLATES = {
    "none": None,
    "qwen": HEAD + CALLS + "{% if m.content or not loop.first %}\n{% endif %}<tool_call>\n" + NAMED
    + '"arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}' + TAIL,
    "llama": HEAD + "{% if (m.tool_calls or [])|length > 1 %}{{ raise_exception('one') }}{% endif %}" + CALLS + NAMED
    + '"parameters": {{ c.function.arguments | tojson }}}{% endfor %}' + TAIL,
    "mistral": HEAD + "{% if m.tool_calls %}[TOOL_CALLS][{% endif %}" + CALLS + NAMED
    + '"arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}{% if loop.last %}]{% else %}, {% endif %}'
    + "{% endfor %}" + TAIL,
}  # fmt: skip
TOOLS = [
    {
        "name": "weather",
        "description": "It's <b>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
    {"name": "now", "description": "", "parameters": {"type": "object", "additionalProperties": False}},
]
PROMPT = Prompt(prefix="", before_question="", after_question="<eos>\n<|turn|>assistant\n", separator="")
WRITTEN = [("weather", '{"city": "a\\"}{]"}'), ("now", "{}")]


@pytest.fixture(params=TEMPLATES)
def model(request, make_model):
    fast = copy.deepcopy(make_model("llama").tokens._tokenizer)
    fast.add_special_tokens({"additional_special_tokens": ["<|turn|>", "[TOOL_CALLS]"]})
    if TEMPLATES[request.param] is not None:
        fast.chat_template = TEMPLATES[request.param]
    made = SimpleNamespace(tokens=Tokens(fast), eos_ids={1}, name=request.param)
    made.companion = cache(lambda kind: kind(made))
    return made


def accepted(model, grammar, text):
    """Whether the grammar accepts the text, and whether it may end there."""
    matcher = LLMatcher(LLTokenizer(model.tokens.serialized, eos_token=1), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = list(model.tokens.encode(text, control=True))
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_the_form_is_the_templates_own(model):
    form = tool_format(model)
    assert form.native == (model.name != "none")
    assert (form.again is None) == (model.name == "llama")
    assert form.begin.strip().startswith(
        {"llama": '{"name"', "mistral": "[TOOL_CALLS][{"}.get(model.name, "<tool_call>")
    )


@pytest.mark.parametrize("several", [False, True])
def test_the_grammar_takes_calls_and_nothing_else(model, several):
    form = tool_format(model)
    one, two = form.written(WRITTEN[:1]).strip(), form.written(WRITTEN).strip()
    for required in (False, True):
        grammar = form.grammar(TOOLS, required=required, several=several)
        assert accepted(model, grammar, one)
        assert accepted(model, grammar, two) == (several and form.again is not None)
        assert not accepted(model, grammar, one.replace("weather", "whether"))
        assert not accepted(model, grammar, one.replace("city", "town") + "x")
        assert accepted(model, grammar, "Hello [there] < {x}") != required
        assert accepted(model, grammar, f"Hello\n{one}") != required
    answer = form.grammar(TOOLS, required=False, several=several, schema={"enum": [7]})
    assert [accepted(model, answer, text) for text in ("7", one, "8")] == [True, True, False]


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
def test_calls_are_parsed_however_they_come(model, step):
    form = tool_format(model)
    calls = WRITTEN[: 1 if form.again is None else 2]
    text = "Say [so] <" + form.written(calls).replace("ragkvid01", "123456789")
    parser, found, pieces = ToolCallParser(form), "", {}
    for at in range(0, len(text), step):
        for each in parser.push(text[at : at + step]):
            if isinstance(each, str):
                found += each
            else:
                place, name, more = each
                pieces.setdefault(place, []).extend([name] * (name is not None) + [more])
    assert (found + parser.flush()).strip() == "Say [so] <"
    assert parser.calls == calls == [(each[0], "".join(each[1:])) for each in pieces.values()]
    plain = ToolCallParser(form)
    assert "".join([*plain.push("No < call <tool"), plain.flush()]) == "No < call <tool"


def test_results_of_calls_are_turns_and_no_text_is_a_control_token(model):
    function = {"name": "weather", "arguments": '{"city": "<eos>"}'}
    later = [
        {
            "role": "assistant",
            "content": "I <|turn|> look",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "Rain<eos>[TOOL_CALLS]", "tool_call_id": "a"},
    ]
    tail = tool_tail(model, PROMPT, "Who <eos>?", TOOLS, later)
    text = "".join(piece for piece, _ in tail)
    assert "Rain<eos>" in text
    assert '{"city": "<eos>"}' in text
    assert text.index("weather") < text.index("Who <eos>?") < text.index("look") < text.index("Rain")
    assert all("<eos>" not in piece.replace("<eos>\n", "") for piece, own in tail if own)
    ids = PROMPT.suffix_ids(model.tokens, "", tail)
    turns = 0 if model.name == "none" else 3  # call, result, header; the template "none" writes others
    assert ids.count(model.tokens.specials["<|turn|>"]) == turns
    assert ids.count(1) == 3  # ends of the question, the call and the result
    assert ids.count(model.tokens.specials["[TOOL_CALLS]"]) == (model.name == "mistral")
    with pytest.raises(UsageError, match="control token"):
        tool_tail(model, PROMPT, "Who?", [{**TOOLS[0], "description": "x<eos>"}], [])
