"""The mini tokenizer loses no text and spells a name the same way wherever it stands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from ragkv.benchmarks.mini.sample import prefix_text, suffix_text
from ragkv.benchmarks.mini.tokenizer import INSTRUCTION
from ragkv.worlds import World

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SENTINEL = "\x00chunks\x00"


def ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_any_text_round_trips(tokenizer: PreTrainedTokenizerFast) -> None:
    @settings(max_examples=200, deadline=None)
    @given(st.text(st.characters(exclude_categories=["Cs"])))
    def check(text: str) -> None:
        assert tokenizer.decode(ids(tokenizer, text)) == text

    check()


@pytest.mark.parametrize(
    "text", ["", "  two  spaces ", "a\r\n\tb", "Straße 日本語 🜚 é", "<|end|>x", "3.14 % of 20,000"]
)
def test_hard_texts_round_trip(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(ids(tokenizer, text)) == text


def test_names_are_spelled_alike_everywhere(tokenizer: PreTrainedTokenizerFast) -> None:
    for document in World.generate(1, split="heldout").documents:
        name = ids(tokenizer, document.title)
        for before, after in (("\n", "\n"), ("the ", "."), ("# ", "\n\n"), ("", "?")):
            found = ids(tokenizer, before + document.title + after)
            assert any(found[start : start + len(name)] == name for start in range(len(found)))


def test_template_equals_the_parts(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    rendered = loaded.apply_chat_template(
        [
            {"role": "system", "content": INSTRUCTION},
            {"role": "user", "content": f"Documents:\n\n{SENTINEL}Question: Who?"},
        ],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert rendered.split(SENTINEL) == [prefix_text(), suffix_text("Who?")]
    assert ids(loaded, prefix_text()).count(loaded.bos_token_id) == 1
    assert loaded.unk_token_id is None
