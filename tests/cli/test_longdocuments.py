"""`ragkv ingest --long-documents apb`: given lengths, documents that are too short, and appended text."""

import json
from pathlib import Path

import pytest
from longbook import CHUNK, book, tiny_model

from ragkv.config import load_config

BLOCKS = 40
APB = ("--long-documents", "apb", "--engines", "apb", "--chunk-tokens", CHUNK)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), model_folder)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(book(BLOCKS))
    return path


def test_what_is_too_short_is_said_once(ragkv, tmp_path, model, source):
    command = ("ingest", "--index", tmp_path / "index", "--model", model, *APB)
    one = ragkv(*command, source, "--json")
    says = f"{source} is one block, by plain attention: apb is for documents of 32,768 tokens and more"
    assert one.err.count("one block") == one.err.count(says) == 1
    assert json.loads(one.out)["one_block"] == [str(source)]
    assert json.loads(one.out)["kv_encoded"] == 1
    again = ragkv(*command, source)
    assert "one block" not in again.err  # nothing was encoded
    for name in ("more", "yet-more"):
        (tmp_path / f"{name}.txt").write_text(name + book(20))
    (tmp_path / "note.txt").write_text("A chunk.")  # one block for another reason
    several = ragkv(*command, *tmp_path.glob("*.txt"))
    assert several.err.count("2 documents are one block each") == 1
    assert "note.txt is" not in several.err
    source.write_text(book(30))
    assert "one block" not in ragkv(*command, source, "--quiet").err


def test_given_lengths_cut_what_is_short(ragkv, tmp_path, model, source):
    command = ("ingest", source, "--index", tmp_path / "index", "--model", model, *APB, "--json")
    result = ragkv(*command, "--block-tokens", "64")
    assert result.code == 0
    assert json.loads(result.out)["kv_encoded"] == 6  # 320 tokens, and the anchor
    assert load_config(tmp_path / "index").tuning["apb"] == {"block": 64}
    assert ragkv(*command, "--block-tokens", "64").code == 0
    other = ragkv(*command, "--block-tokens", "64,16,8")
    assert other.code == 1
    assert "leave --block-tokens out" in other.sentence
    assert json.loads(ragkv(*command).out)["unchanged"] == [str(source)]
