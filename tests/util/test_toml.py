"""An index's settings are read back unchanged, and an untrusted `ragkv.toml` is read within limits."""

import errno
import math
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import NIGHTLY

from ragkv import RagKV
from ragkv.cli.options import UserFile
from ragkv.config import (
    CONFIG_FILE,
    MODES,
    VECTORS,
    EncodingConfig,
    IndexConfig,
    IngestConfig,
    PromptConfig,
    QdrantConfig,
    RuntimeConfig,
    StepsConfig,
    TierConfig,
    load_config,
    save_config,
)
from ragkv.decoding import Decoding
from ragkv.errors import ConfigError, StoreError
from ragkv.util.files import dump_toml, edit_toml, parse_toml

TEXTS = st.text(
    st.characters(exclude_categories=("Cs",)) | st.sampled_from("\0\x1b\r\n\t\x7f\x9b\u2028\u202e\\\"'#[].=")
)
WHOLE = st.integers(-(1 << 63), (1 << 63) - 1)
VALUES = st.recursive(
    TEXTS | WHOLE | st.floats() | st.booleans() | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
PROMPTS = st.builds(
    PromptConfig,
    system=TEXTS,
    context=TEXTS,
    question=st.builds("{}{{question}}{}".format, *[TEXTS.filter(lambda text: "{question}" not in text)] * 2).filter(
        lambda text: text.count("{question}") == 1
    ),
    separator=TEXTS,
    prefix_newlines=st.integers(0, 1000),
    bos=st.sampled_from(("auto", "none")),
)
LIMITS = st.builds(
    IngestConfig,
    max_file=st.sampled_from(("512MiB", "1.5 GiB", 1)) | st.integers(1, (1 << 63) - 1),
    max_characters=st.integers(1, (1 << 63) - 1),
    max_memory=st.sampled_from(("64MiB", "1GiB")) | st.integers(64 << 20, (1 << 63) - 1),
    max_seconds=st.integers(1, (1 << 63) - 1),
    ocr=st.sampled_from(("auto", "none", "eng+deu")),
    memory=st.sampled_from(("64MiB", "1GiB")) | st.integers(64 << 20, (1 << 63) - 1),
)
DECODINGS = st.builds(
    Decoding,
    temperature=st.none() | st.just(0) | st.floats(1e-4, 100),
    top_p=st.none() | st.floats(0, 1, exclude_min=True),
    top_k_tokens=st.none() | st.integers(1, (1 << 63) - 1),
    min_p=st.none() | st.floats(0, 1, exclude_min=True),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-2, 2).map(lambda penalty: penalty or 0.0),  # -0.0 is written as 0.0
    frequency_penalty=st.floats(-2, 2).map(lambda penalty: penalty or 0.0),
    seed=st.none() | st.integers(0, (1 << 63) - 1),
    stop=st.lists(TEXTS.filter(bool), max_size=3),
    stop_ids=st.lists(st.integers(0, (1 << 63) - 1), max_size=3),
    thinking=st.sampled_from(("off", "on")) | st.integers(1, 1000),
    **dict.fromkeys(("schema", "regex", "grammar"), st.none()),  # at most one, and not with `stop`: see below
)
TIERS = st.builds(
    TierConfig,
    url=st.sampled_from(("redis://localhost:6379", "file:///srv/kv", "s3://bucket/a b")),
    namespace=st.from_regex(r"[a-z0-9-]{1,64}", fullmatch=True),
    secret=st.sampled_from(("", "RAGKV_SECRET")),
    timeout=st.floats(0.001, 60),
    ttl=st.integers(0, (1 << 31) - 1),
)
QDRANTS = st.builds(
    QdrantConfig,
    url=st.sampled_from(("", "http://host:6333", "https://host/prefix", "memory://")),
    collection=st.from_regex(r"[A-Za-z0-9_-]{0,200}", fullmatch=True),
    api_key=st.sampled_from(("", "QDRANT_KEY")),
    timeout=st.integers(1, 600),
)
AUTO_OR_NUMBER = st.just("auto") | st.integers(1, (1 << 63) - 1)
ENCODINGS = st.builds(EncodingConfig, context=st.integers(0, 1 << 16))
RUNTIMES = st.builds(RuntimeConfig, batch_tokens=AUTO_OR_NUMBER, max_sequences=AUTO_OR_NUMBER)
STEPS = st.builds(
    StepsConfig,
    count=st.integers(1, 8),
    prompt=TEXTS.map(lambda text: text + "{question}"),
    query=TEXTS.map(lambda text: text + "{written}"),
    enough=TEXTS,
    max_new_tokens=st.integers(1, 1024),
    rewrite=st.booleans(),
    rewrite_prompt=TEXTS.map(lambda text: "{history}" + text + "{question}"),
)
CONFIGS = st.builds(
    IndexConfig,
    steps=STEPS,
    runtime=RUNTIMES,
    encoding=ENCODINGS,
    model=TEXTS,
    executor=st.sampled_from(("transformers", "llama-cpp")),
    dtype=st.sampled_from(("auto", "float32", "bfloat16", "float16", "int8")),
    chunk_tokens=st.integers(8, 1 << 16),
    codec=TEXTS,
    engines=st.lists(TEXTS, max_size=3) | st.lists(TEXTS, max_size=3).map(tuple),
    default_engine=TEXTS,
    top_k=st.integers(1, (1 << 63) - 1),
    embedder=TEXTS.filter(lambda text: text != "none"),
    reranker=TEXTS,
    rerank=st.booleans(),
    vectors=st.permutations(VECTORS).map(tuple),  # all of them, so that every mode is possible
    fusion=st.sampled_from(("relative", "rrf")),
    retrieval=st.sampled_from(MODES),
    candidates=st.integers(1, (1 << 63) - 1),
    index_factory=TEXTS,
    memory_budget=st.sampled_from(("auto", "2GiB", " 1.5 KB", 0)) | st.integers(0, (1 << 63) - 1),
    kv=st.sampled_from(("all", "on-demand")),
    history=st.sampled_from(("auto", "prompt", "search", "none")),
    kv_budget=st.sampled_from(("none", "200GB", "1.5 GiB")) | st.integers(1, (1 << 63) - 1),
    prompt=PROMPTS,
    decoding=DECODINGS,
    ingest=LIMITS,
    tuning=st.dictionaries(TEXTS, st.dictionaries(TEXTS, VALUES, max_size=4), max_size=3),
    tiers=st.lists(TIERS, max_size=2).map(tuple),
    qdrant=QDRANTS,
)


def result(value: Any) -> str:
    """Equal strings for equal values, including NaN and tables with another key order."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {result(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, IndexConfig):
        return repr({field.name: result(getattr(value, field.name)) for field in fields(value)})
    return repr(value) if not isinstance(value, list) else f"[{', '.join(map(result, value))}]"


def test_every_setting_is_drawn():
    for drawn in (CONFIGS, STEPS, PROMPTS, RUNTIMES, ENCODINGS, LIMITS, DECODINGS, TIERS, QDRANTS):
        made = drawn.wrapped_strategy
        assert {field.name for field in fields(made.target)} == made.kwargs.keys()


@settings(max_examples=100 if NIGHTLY else 50)
@given(CONFIGS)
def test_an_index_reads_back_what_it_was_made_with(config):
    text = config.to_toml()
    assert result(IndexConfig.from_toml(text)) == result(config)
    text.encode()


@pytest.mark.parametrize(
    "one", [{"schema": '{"type": "integer"}'}, {"regex": "[a-z]+"}, {"grammar": 'start: "yes" | "no"'}]
)
def test_what_answers_are_restricted_to_reads_back(one):
    config = IndexConfig(decoding=Decoding(**one))
    assert IndexConfig.from_toml(config.to_toml()) == config


@pytest.mark.parametrize("number", [1e308 * 10, -math.inf, 5e-324, 1e16, -0.0, 0.1 + 0.2])
def test_numbers_at_the_edge(number):
    config = IndexConfig(tuning={"ape": {"scale": number}})
    assert result(IndexConfig.from_toml(config.to_toml())) == result(config)
    assert math.isnan(parse_toml(dump_toml({"x": math.nan}), source="x")["x"])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model": "a\udcff"}, "model = 'a\\udcff' is not valid Unicode text"),
        ({"tuning": {"ape": {"\ud800": 1}}}, "is not valid Unicode text"),
        ({"tuning": {"ape": {"scale": None}}}, "tuning.ape.scale = None cannot be kept"),
        ({"tuning": {"ape": {"scale": b"x"}}}, "tuning.ape.scale = b'x' cannot be kept"),
        ({"tuning": {"ape": {"scale": 1 << 63}}}, "more than 64 bits"),
        ({"tuning": {"ape": {3: 1}}}, "has the key 3"),
        ({"top_k": 10**5000}, "top_k is a number of more than 64 bits"),
        ({"decoding": Decoding(stop=("\ud800",))}, "decoding.stop = '\\ud800' is not valid Unicode text"),
        ({"model": 3}, "model must be a string, not 3"),
        ({"engines": "ape"}, "engines must be a list of strings, not 'ape'"),
        ({"prompt": {"system": "x"}}, "prompt must be a table, not {'system': 'x'}"),
    ],
)
def test_what_toml_cannot_say_is_refused_when_it_is_set(settings, says):
    with pytest.raises(ConfigError) as error:
        IndexConfig(**settings)
    assert says in str(error.value)
    with pytest.raises(ConfigError, match=r"prompt\.system"):
        IndexConfig(prompt=PromptConfig(system="\udcff"))


@pytest.mark.parametrize("name", ["max_characters", "max_seconds"])
@pytest.mark.parametrize("value", ["60", 1.5, True, None, 1 << 63])
def test_limits_of_documents_are_checked_when_they_are_set(name, value):
    """A string gave a TypeError; 1.5 and True gave an index that could not be opened again."""
    with pytest.raises(ConfigError, match=rf"ingest\.{name}"):
        IngestConfig(**{name: value})


def test_an_index_with_control_characters_opens_again(tmp_path, model_folder):
    prompt = PromptConfig(system="Two\r\nlines \x1b[31m\0\u2028", separator="\x85\n")
    with RagKV.create(tmp_path / "index", model=str(model_folder), prompt=prompt) as rag:
        config = rag.config
    with RagKV.open(tmp_path / "index") as rag:
        assert (rag.config, rag.config.prompt) == (config, prompt)


BY_HAND = """\
# The notes of ours.
top_k = 5   # they are short

kv_budget="200GB"# the disk's
model = 'mini'\r
engines = [
  "ape",  # first
  "block",
]

[prompt]   # ours
system = '''
top_k = 7
[tuning]'''
[tuning.ape]
temperature=0.9 # by hand
[tuning.pced]
n = 1_000
"""


def test_what_does_not_change_in_a_file_stays_as_it_was_written(tmp_path):
    path = tmp_path / CONFIG_FILE
    path.write_bytes(BY_HAND.encode())
    config = load_config(tmp_path)
    save_config(tmp_path, config)
    assert path.read_bytes() == BY_HAND.encode()
    tuning = {**config.tuning, "ape": {"temperature": 0.5, "scale": 0.7}}
    changed = replace(config, top_k=6, kv="on-demand", kv_budget=3, tuning=tuning, decoding=Decoding(seed=1))
    save_config(tmp_path, changed)
    assert load_config(tmp_path) == changed
    expected = BY_HAND.replace("top_k = 5 ", "top_k = 6 ").replace('"200GB"', "3").replace("=0.9 ", "=0.5 ")
    text = path.read_bytes().decode()
    assert set(expected.splitlines()) <= set(text.splitlines())
    new = [line for line in text.splitlines() if line not in expected.splitlines()]
    assert new == ['kv = "on-demand"', "scale = 0.7", "[decoding]", "seed = 1"]
    save_config(tmp_path, replace(changed, tuning={}, decoding=Decoding()))
    assert load_config(tmp_path) == replace(changed, tuning={}, decoding=Decoding())
    assert "# ours" in path.read_text()
    assert "seed" not in path.read_text()


def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """New files cannot be written, as on a full disk."""
    sync = os.fsync

    def fail(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().suffix == ".new":
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)


@pytest.mark.parametrize("comment", ["", "# " + "long " * 300])
def test_a_full_disk_takes_a_configuration_over_the_old_one(tmp_path, monkeypatch, comment):
    config = IndexConfig(top_k=7, kv_budget=10**12)
    (tmp_path / CONFIG_FILE).write_text(config.to_toml() + comment)
    full(monkeypatch)
    for budget in (1, 10**15):  # shorter, and longer
        save_config(tmp_path, replace(config, kv_budget=budget))
        assert load_config(tmp_path) == replace(config, kv_budget=budget)
        assert comment in (tmp_path / CONFIG_FILE).read_text()
    assert [path.name for path in tmp_path.iterdir()] == [CONFIG_FILE]


def test_a_full_disk_leaves_the_old_configuration_where_the_new_one_has_no_room(tmp_path, monkeypatch):
    full(monkeypatch)
    with pytest.raises(StoreError, match="No space left"):
        save_config(tmp_path, IndexConfig())
    assert not list(tmp_path.iterdir())
    text = IndexConfig(top_k=7).to_toml() + "# " + "long " * 2000
    (tmp_path / CONFIG_FILE).write_text(text)
    with pytest.raises(StoreError, match="No space left"):
        save_config(tmp_path, IndexConfig(top_k=8))
    assert (tmp_path / CONFIG_FILE).read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == [CONFIG_FILE]


@settings(max_examples=25)
@given(CONFIGS, CONFIGS, st.sampled_from(fields(IndexConfig)))
def test_any_configuration_becomes_any_other_and_keeps_its_comments(before, after, one):
    texts = [config.to_toml() for config in (before, after, replace(before, **{one.name: getattr(after, one.name)}))]
    tables = [parse_toml(text, source="x") for text in texts]
    for wanted in (1, 2):
        text = edit_toml(f"# first\n{texts[0]}", tables[0], tables[wanted])
        assert result(IndexConfig.from_toml(text)) == result(IndexConfig.from_toml(texts[wanted]))
        assert text.startswith("# first\n")


def test_a_file_that_cannot_be_edited_is_written_anew(tmp_path, monkeypatch, caplog):
    for edit in (lambda *_: "top_k = 1", lambda *_: "top_k =", lambda *_: edit_toml("a = {", {}, {})):
        (tmp_path / CONFIG_FILE).write_text("# mine\ntop_k = 5\n")
        monkeypatch.setattr("ragkv.config.edit_toml", edit)
        caplog.clear()
        save_config(tmp_path, IndexConfig(top_k=6))
        assert load_config(tmp_path) == IndexConfig(top_k=6)
        assert "is rewritten without its comments" in caplog.text


HOSTILE = {
    "not UTF-8": (b'model = "\xff"', "not UTF-8 text"),
    "UTF-16": ('model = "mini"'.encode("utf-16"), "not UTF-8 text"),
    "a control character": (b'model = "a\rb"', "is not valid TOML"),
    "larger than any": (b"#" * (1 << 21), "larger than 1 MiB"),
    "lists in lists": (b"tuning = " + b"[" * 100_000, "nested too deeply"),
    "tables in tables": (b"tuning = " + b"{a=" * 50_000, "nested too deeply"),
    "one dotted key": (b"tuning." + b"a." * 200_000 + b"a = 1", "nested too deeply"),
    "a dotted key of strings": (b"tuning." + b'"a".' * 100_000 + b"a = 1", "nested too deeply"),
    "a dotted header": (b"[tuning." + b"a." * 200_000 + b"a]", "nested too deeply"),
    "somewhat deep": (b"tuning." + b"a." * 100 + b"a = 1", "nested too deeply"),
    "digits without end": (b"top_k = " + b"9" * 100_000, "is not valid TOML"),
    "a long value": (b'top_k = "' + b"9" * 100_000 + b'"', "top_k must be a whole number"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_one_short_sentence(tmp_path, kind):
    data, says = HOSTILE[kind]
    path = tmp_path / CONFIG_FILE
    path.write_bytes(data)
    for read in (lambda: load_config(tmp_path), lambda: UserFile.read(path)):
        with pytest.raises(ConfigError) as error:
            read()
        assert says in str(error.value)
        assert str(path) in str(error.value)
        assert len(str(error.value)) < 400 + len(str(path))


def test_what_is_no_file_is_said_at_once(tmp_path):
    for name, make in (("folder", Path.mkdir), ("pipe", os.mkfifo)):
        (tmp_path / name).mkdir()
        make(tmp_path / name / CONFIG_FILE)
        with pytest.raises(ConfigError, match="must be a regular file"):
            load_config(tmp_path / name)
    (tmp_path / "zeros").mkdir()
    (tmp_path / "zeros" / CONFIG_FILE).symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="must be a regular file"):
        load_config(tmp_path / "zeros")


def test_what_is_odd_and_right_is_read(tmp_path):
    (tmp_path / CONFIG_FILE).write_bytes(b'\xef\xbb\xbfmodel = "mini"\r\n')  # as written by editors on Windows
    assert load_config(tmp_path).model == "mini"
    many = "One. Two. 'Three'. " * 9000  # a prompt may have more dots than any key
    (tmp_path / CONFIG_FILE).write_text(IndexConfig(prompt=PromptConfig(system=many)).to_toml())
    assert load_config(tmp_path).prompt.system == many
    (tmp_path / CONFIG_FILE).write_text(f'[prompt]\nsystem = """\n{many}"""\n')
    assert load_config(tmp_path).prompt.system == many
