"""`[prompt] bos`: with exactly one BOS, or with none wherever it would come from, and never with the other one's KV."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace

import pytest
from tokenizers import processors

from ragkv import RagKV
from ragkv.config import PromptConfig, load_config, save_config
from ragkv.errors import ConfigError
from ragkv.evaluation.answerer import contenders
from ragkv.evaluation.spec import parse_specs
from ragkv.index.creation import new_config
from ragkv.model.prompt import Tokens, render

ENGINES = ["full", "ape", "block", "pced", "mapreduce"]
ONCE = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<eos>{% endfor %}[assistant]"
EACH = "{% for m in messages %}{{ bos_token }}[{{ m['role'] }}]{{ m['content'] }}<eos>{% endfor %}{{ bos_token }}[a]"
NEVER = ONCE.removeprefix("{{ bos_token }}")


@pytest.fixture
def tokenizer(make_model):
    return copy.deepcopy(make_model("llama").tokens._tokenizer)


def adding(tokenizer):
    """The tokenizer, as one that puts a BOS before every text."""
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 0)]
    )
    return tokenizer


def ids_of(tokenizer, bos, **words):
    tokens = Tokens(tokenizer)
    prompt = render(PromptConfig(bos=bos, **words), tokens)
    return prompt.prefix_ids(tokens), prompt.suffix_ids(tokens, "Who?")


@pytest.mark.parametrize("template", [ONCE, NEVER, None])
def test_one_or_none_where_the_tokenizer_adds_one(tokenizer, template):
    adding(tokenizer).chat_template = template
    (one, suffix), (none, same) = ids_of(tokenizer, "auto"), ids_of(tokenizer, "none")
    assert one == (0, *none)
    assert 0 not in none
    assert suffix == same


@pytest.mark.parametrize("bos", ["auto", "none"])
def test_a_tokenizer_that_adds_none(tokenizer, bos):
    """What its template writes at the beginning is a BOS; what it writes before every turn is a marker of turns."""
    tokenizer.chat_template = NEVER
    assert 0 not in ids_of(tokenizer, bos)[0]
    tokenizer.chat_template = ONCE
    assert ids_of(tokenizer, bos)[0].count(0) == (bos == "auto")
    tokenizer.chat_template = EACH
    prefix, suffix = ids_of(tokenizer, bos)
    assert (prefix.count(0), suffix.count(0)) == (2, 1)


def test_a_template_that_writes_the_tokenizers_own_bos_before_every_turn(tokenizer):
    adding(tokenizer).chat_template = EACH
    assert [part.count(0) for part in ids_of(tokenizer, "auto")] == [2, 1]
    assert [part.count(0) for part in ids_of(tokenizer, "none")] == [0, 0]


def test_an_end_token_that_begins_texts_too_still_ends_turns(tokenizer):
    adding(tokenizer).chat_template = NEVER.replace("<eos>", "<bos>")
    tokenizer.eos_token = "<bos>"
    (one, suffix), (none, same) = ids_of(tokenizer, "auto"), ids_of(tokenizer, "none")
    assert (one, suffix) == ((0, *none), same)
    assert (none.count(0), same.count(0)) == (1, 1)  # of the system's turn, and of the user's


def test_auto_is_the_identity_that_there_always_was():
    prompt = PromptConfig()
    assert set(prompt.facts()) == {"system", "context", "question", "separator", "prefix_newlines"}
    assert PromptConfig(bos="none").facts() == {**prompt.facts(), "bos": "none"}
    with pytest.raises(ConfigError, match=r"prompt\.bos must be one of auto, none"):
        PromptConfig(bos="always")


@pytest.fixture
def model(model_folder, tokenizer, tmp_path):
    """A base model whose tokenizer adds a BOS: without words of the index's, nothing else stands before documents."""
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    adding(tokenizer).chat_template = None
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def note(tmp_path):
    path = tmp_path / "note.md"
    path.write_text("Halden Works was founded by Mira Oskel in 1907.\n\nIt is based in Tarn.\n")
    return path


def ask(index, **options):
    with RagKV.open(index) as rag:
        return rag.query("Who founded Halden Works?", top_k=1, max_new_tokens=3, **options), rag.index.prefix_ids


@pytest.mark.parametrize("words", [{"system": "Be.", "context": "D:\n"}, {"system": "", "context": ""}])
def test_a_change_is_a_miss_and_a_new_encoding(words, model, note, tmp_path):
    index = tmp_path / "index"
    with RagKV.create(index, model=str(model), device="cpu", prompt=PromptConfig(**words)) as rag:
        rag.ingest(note)
        assert "bos" not in {**rag.store.get_meta("prompt")["config"], **rag.store.get_meta("prompt")["parts"]}
    hit, prefix = ask(index, engine="ape")
    assert (hit.kv.hits, hit.kv.misses, prefix[0]) == (1, 0, 0)
    config = load_config(index)
    save_config(index, replace(config, prompt=replace(config.prompt, bos="none")))
    missed, without = ask(index, engine="ape")
    assert (missed.kv.hits, missed.kv.misses, without) == (0, 1, prefix[1:])
    assert (not without) == (words["system"] == "")
    with RagKV.open(index) as rag:
        assert len(rag.ingest(note).updated) == 1
        assert len(rag.ingest(note).unchanged) == 1
    for engine in ENGINES:
        answer, _ = ask(index, engine=engine)
        assert answer.kv.misses == 0
    save_config(index, config)
    assert ask(index, engine="block")[0].kv.hits == 1  # a chunk alone has seen no BOS


def test_pced_and_ape_with_nothing_before_the_documents_are_the_model_itself(model, note, tmp_path):
    index, prompt = tmp_path / "index", PromptConfig(system="", context="", bos="none")
    with RagKV.create(index, model=str(model), device="cpu", prompt=prompt) as rag:
        rag.ingest(note)
        full = rag.query("Who founded it?", engine="full", top_k=1, max_new_tokens=6).text
        ape = {"temperature": 1.0, "scale": 1.0}
        save_config(index, replace(rag.config, tuning={"pced": {"beta": 0.0}, "ape": ape}))
    for engine in ("ape", "pced", "block"):
        with RagKV.open(index) as rag:
            assert rag.query("Who founded it?", engine=engine, top_k=1, max_new_tokens=6).text == full


def test_a_sink_of_the_bos_needs_one(model, note, tmp_path):
    index = tmp_path / "index"
    tuning = {"block": {"sink": "bos"}}
    with RagKV.create(index, model=str(model), device="cpu", prompt=PromptConfig(bos="none"), tuning=tuning) as rag:
        rag.ingest(note)
        with pytest.raises(ConfigError, match=r'sink = "bos" of the engine block needs a BOS'):
            rag.query("Who founded it?", engine="block")


def test_a_tuned_checkpoint_says_it_for_new_indexes(model):
    assert new_config({"model": str(model)}).prompt.bos == "auto"
    (model / "ragkv.json").write_text(json.dumps({"block_tuned": True, "bos": "none"}))
    made = new_config({"model": str(model), "prompt": PromptConfig(system="Be.")})
    assert made.prompt == PromptConfig(system="Be.", bos="none")
    [one] = contenders(parse_specs("block"), models=[str(model)])
    assert one.prompt.bos == "none"
    [other] = contenders(parse_specs("block(prompt.bos=auto)"), models=[str(model)])
    assert other.prompt.bos == "auto"
    (model / "ragkv.json").write_text(json.dumps({"bos": "never"}))
    with pytest.raises(ConfigError, match=r"bos in ragkv\.json of model .* must be one of auto, none, not 'never'"):
        new_config({"model": str(model)})
