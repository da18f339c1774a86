"""The prompt's parts put together are the chat template's own text, for templates of every temper and for none."""

from __future__ import annotations

import copy

import pytest
from controlled import controlled
from vocabulary import tokens_of

from ragkv.config import PromptConfig
from ragkv.errors import ConfigError
from ragkv.model.prompt import Tokens, closing, render

HEADER = "{% if add_generation_prompt %}[assistant]\n{% endif %}"
TURNS = "{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] }}<eos>\n{% endfor %}" + HEADER
NO_SYSTEM = "{% for m in messages %}{% if m['role'] == 'system' %}"
TEMPLATES = {
    "turns": TURNS,
    "raises on system": NO_SYSTEM + "{{ raise_exception('no system role') }}{% endif %}{% endfor %}" + TURNS,
    "drops system": TURNS.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'system' %}"),
}
CONFIG = PromptConfig(
    system="Be brief.", context="Documents:\n", question="Q: {question} (in short)", separator="\n--\n"
)
DOCUMENTS, QUESTION = ["One fact.", "Another."], "Who? [user]"


@pytest.fixture
def tokenizer(make_model):
    return copy.deepcopy(make_model("llama").tokens._tokenizer)


def with_template(tokenizer, template):
    tokenizer.chat_template = template
    return Tokens(tokenizer)


def whole(prompt):
    """What the model is given, as text."""
    documents = "".join(document + prompt.separator for document in DOCUMENTS)
    return prompt.before_contexts + documents + prompt.before_question + QUESTION + prompt.after_question


USER = "Documents:\nOne fact.\n--\nAnother.\n--\nQ: Who? [user] (in short)"


@pytest.mark.parametrize("kind", TEMPLATES)
def test_the_parts_are_the_templates_text(kind, tokenizer):
    """A system text that the template refuses or drops stands before the user's own."""
    prompt = render(CONFIG, with_template(tokenizer, TEMPLATES[kind]))
    if kind == "turns":
        assert whole(prompt) == f"[system]\nBe brief.<eos>\n[user]\n{USER}<eos>\n[assistant]\n"
    else:
        assert whole(prompt) == f"[user]\nBe brief.\n\n{USER}<eos>\n[assistant]\n"


def test_a_base_model_gets_plain_text(tokenizer):
    tokens = with_template(tokenizer, None)
    assert whole(render(CONFIG, tokens)) == f"Be brief.\n\n{USER}\nAnswer:"
    bare = PromptConfig(system="", context="", question="{question}", separator=" ")
    assert whole(render(bare, tokens)) == "One fact. Another. Who? [user]\nAnswer:"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[-1]['content'] }}{{ messages[-1]['content'] }}",
        "{{ messages[0]['content'] }}" + HEADER,
        "{{ messages[-1]['content'][:40] }}",
    ],
)
def test_a_template_that_repeats_or_drops_the_users_message_is_refused(template, tokenizer):
    with pytest.raises(ConfigError, match="repeats or drops"):
        render(CONFIG, with_template(tokenizer, template))


def test_ids_are_those_of_the_text_part_by_part(tokenizer):
    """Chunks with their separator, the question with the words around it; newlines after the prefix are tokens."""
    tokens = with_template(tokenizer, TURNS)
    prompt = render(PromptConfig(system="Be brief.", prefix_newlines=3, separator=" | "), tokens)
    assert tokens.decode(prompt.prefix_ids(tokens)) == prompt.before_contexts.replace("<eos>", "")
    assert prompt.before_contexts.endswith("Documents:\n\n\n\n\n")
    assert prompt.chunk_ids(tokens, "One.") == tokens.encode("One. | ")
    suffix = prompt.suffix_ids(tokens, "Who?")
    assert tokens.decode(suffix) == "Question: Who?\n[assistant]\n"
    assert suffix.count(tokens.eos_id) == 1  # the template's own end of turn, and no text


def test_newlines_after_the_prefix_where_a_tokenizer_marks_the_start_of_a_text():
    """Llama 2's puts a space before every text that it is given: it must not stand before each newline."""
    tokens = tokens_of("byte fallback")
    assert len(tokens.encode("\n")) == 2  # the mark, then the newline
    config = PromptConfig(system="", context="", prefix_newlines=4)
    ids = render(config, tokens).prefix_ids(tokens)
    assert ids[-4:] == tokens.encode("\n")[-1:] * 4
    assert ids.count(tokens.encode("\n")[0]) <= 1


@pytest.mark.parametrize("kind", ["byte-level BPE", "byte-level BPE, whole words", "metaspace BPE"])
def test_a_name_of_a_control_token_is_written_as_the_tokenizer_itself_writes_it(kind):
    """Where it can: the same text has the same ids, and so the same stored KV, in every version."""
    own, text = controlled(kind), "the</s>the <|user|>th"
    expected = own(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert Tokens(own).encode(text) == tuple(expected)


def test_generated_control_tokens_are_not_text(tokenizer):
    tokens = with_template(tokenizer, TURNS)
    assert tokens.decode([0, *tokens.encode("yes"), 1, 2]) == "yes"


def test_byte_tokens_are_those_that_the_vocabulary_has():
    """A name that it lacks is looked up as the unknown token, which is no byte."""
    assert len(Tokens(controlled("metaspace BPE")).byte_ids) == 256
    for kind in ("WordLevel", "WordPiece", "byte-level BPE"):
        assert Tokens(controlled(kind)).byte_ids == frozenset()


def test_what_stands_between_header_and_answer_and_after_it(tokenizer):
    """Fine-tuning teaches what the template writes there; a header that differs once the answer is known is not it."""
    assert closing(with_template(tokenizer, TURNS)) == ("", "<eos>\n")
    spaced = TURNS.replace("{{ m['content'] }}", "{{ ' ' if m['role'] == 'assistant' }}{{ m['content'] }}")
    assert closing(with_template(tokenizer, spaced)) == (" ", "<eos>\n")
    thinking = TURNS.replace(HEADER, "{% if add_generation_prompt %}[assistant]<think></think>{% endif %}")
    assert closing(with_template(tokenizer, thinking)) == ("", "<eos>\n")
    assert closing(with_template(tokenizer, None)) == (" ", "")
    drops = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ConfigError, match="drops the assistant's message"):
        closing(with_template(tokenizer, drops))


def test_a_prompt_is_kept_with_all_that_it_says(tokenizer):
    """Identities and the index's file are made of it; a `bos` of "auto" is left out, as before there was a choice."""
    tokens = with_template(tokenizer, TURNS)
    facts = render(CONFIG, tokens).facts()
    assert sorted(facts) == ["after_question", "before_question", "prefix", "prefix_newlines", "separator"]
    assert render(PromptConfig(bos="none"), tokens).facts()["bos"] == "none"
