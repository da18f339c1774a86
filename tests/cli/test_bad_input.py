"""What people get wrong: one sentence on stderr that says what to do, exit code 1 or 2, nothing on stdout,
no traceback, and nothing half-written."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from ragkv import RagKV
from ragkv.errors import RetrievalError

ASK = "query 'Who founded Halden Works?' --index {index}"
INTO = "ingest {documents} --model {model} --index {new}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> dict[str, Path]:
    """An index that has been asked before, so that no question has to keep anything; and things that are none."""
    folder = tmp_path_factory.mktemp("place")
    documents = folder / "documents"
    documents.mkdir()
    (documents / "halden.md").write_text("# Halden Works\n\nHalden Works was founded by Mira Oskel in 1907.\n")
    (documents / "bolt.txt").write_text("Bolt Ltd makes valves. Bolt Ltd was founded by Ann Lee in Varn.")
    with RagKV.create(folder / "made", model=str(model_folder), device="cpu", chunk_tokens=128) as rag:
        rag.ingest(documents)
        rag.query("Who founded Halden Works?", max_new_tokens=1)
        rag.backup(folder / "index")  # not as long as the map, so quick to copy
    with RagKV.open(folder / "index") as rag:  # a backup holds nothing derived: questions make it, and --where its part
        rag.query("Who founded Halden Works?", max_new_tokens=1, where=["source=*"])
    with RagKV.create(folder / "hollow", model=str(model_folder)) as rag, pytest.raises(RetrievalError):
        rag.query("Who founded Halden Works?")
    for broken in ("corrupt", "truncated", "garbled", "overset"):
        shutil.copytree(folder / "index", folder / broken)
    data = folder / "corrupt" / "store" / "data.mdb"
    data.write_bytes(b"\x07" * data.stat().st_size)
    data = folder / "truncated" / "store" / "data.mdb"
    data.write_bytes(data.read_bytes()[:9000])
    (folder / "garbled" / "ragkv.toml").write_text("model = [")
    with (folder / "overset" / "ragkv.toml").open("a") as toml:
        toml.write("\n[tuning.ape]\nwarmth = 2\n")
    (folder / "nothing").mkdir()
    (folder / "strange").mkdir()
    (folder / "strange" / "empty.txt").write_bytes(b"")
    (folder / "strange" / "binary.txt").write_bytes(bytes(range(256)) * 8)
    (folder / "strange" / "broken.pdf").write_bytes(b"%PDF-1.4\nthis is not one")
    (folder / "strange" / "sheet.xlsx").write_bytes(b"PK\x03\x04\x00\x00\x00\x00" + bytes(range(256)))
    (folder / "lines.jsonl").write_text('{"question": "Who?"}\n{"question": ')
    return {"folder": folder, "index": folder / "index", "documents": documents, "model": model_folder}


TABLE: list[tuple[str, int, str]] = [
    # the command line itself
    ("conjure", 2, "No such command 'conjure'"),
    ("query Who? --topk 3", 2, "No such option: --topk"),
    ("query Who? --top-k many", 2, "a valid integer"),
    ("backup --index {index}", 2, "Missing argument 'DEST'"),
    ("query --index", 2, "requires an argument"),
    ("--colour", 2, "No such option: --colour"),
    ("bench ttft --tokens a,b", 2, "is not a list of numbers"),
    # the index
    ("query Who? --index {folder}/nowhere", 2, "There is no index at"),
    ("stats --index {documents}", 2, "There is no index at"),
    ("query Who? --index {documents}/bolt.txt", 2, "cannot be read"),
    ("query Who? --index {folder}/corrupt", 1, "restore a backup"),
    ("ls --index {folder}/corrupt", 1, "restore a backup"),
    ("query Who? --index {folder}/truncated", 1, "restore a backup"),
    ("chat --index {folder}/garbled", 2, "not valid TOML"),
    (ASK.replace("{index}", "{folder}/overset") + " --engine ape", 2, "[tuning.ape]: unknown key 'warmth'"),
    ("query Who? --index {folder}/hollow", 1, "holds no document yet"),
    ("ingest {documents} --index {documents}", 2, "is not an index; choose another folder"),
    ("backup {documents} --index {index}", 2, "is not empty"),
    ("compact --output {index}/copy --index {index}", 2, "is inside the index"),
    # what is ingested
    ("ingest {folder}/absent --index {index}", 2, "No such file or folder"),
    ("ingest https://example.org/a.pdf --index {index}", 2, "https://example.org/a.pdf is an address, and only files"),
    ("plan s3://bucket/notes", 2, "s3://bucket/notes is an address, and only files and folders are read; download it"),
    ("ingest {folder}/strange/empty.txt --index {index}", 1, "empty file"),
    ("ingest {folder}/strange/binary.txt --index {index}", 1, "binary file"),
    ("ingest {folder}/strange/broken.pdf --index {index}", 1, "PDF cannot be read"),
    ("ingest {folder}/strange/sheet.xlsx --index {index}", 1, "unsupported type"),
    ("ingest {folder}/nothing --index {index}", 1, "no supported files found"),
    ("ingest {documents} --index {index} --model mini", 1, "was made with model ="),
    ("ingest {documents} --index {index} --chunk-tokens 64", 1, "was made with chunk_tokens = 128, not 64"),
    (
        "ingest {documents} --index {index} --context-tokens 64",
        1,
        "was made with encoding = context 0, not context 64; use another --index, or leave --context-tokens out",
    ),
    ("ingest {documents} --model /no/model --index {new}", 1, "No model folder at"),
    (INTO + " --engines warp", 2, "Unknown engine 'warp'"),
    (INTO + " --codec brotli", 2, "unknown codec 'brotli'"),
    (INTO + " --chunk-tokens 2", 2, "chunk_tokens must lie between"),
    (INTO + " --context-tokens -1", 2, "encoding.context is a number of tokens from 0 to 65536"),
    (INTO + " --dtype float8", 2, "dtype must be one of"),
    (INTO + " --retrieval dense", 2, "needs an embedder"),
    # what is asked
    (ASK + " --engine warp", 2, "Unknown engine 'warp'; choose one of all, apb, ape, block, full"),
    (ASK + " --model mini", 1, "was made by model"),
    (ASK + " --top-k 0", 2, "--top-k must be at least 1, not 0"),
    (ASK + " --max-new-tokens 0", 2, "--max-new-tokens must be at least 1, not 0"),
    (ASK + " --candidates 0", 2, "--candidates must be at least 1, not 0"),
    (ASK + " --retrieval psychic", 2, "--retrieval must be one of"),
    (ASK + " --retrieval dense", 1, "without an embedder"),
    (ASK + " --rerank", 1, "has no reranker"),
    (ASK + " --where source", 2, "--where takes FIELD=PATTERN"),
    (ASK + " --where source=zzz*", 2, "No document matches --where"),
    (ASK + " --temperature -1", 2, "decoding: temperature must be 0 (greedy) or from 0.0001 to 100, not -1.0"),
    (ASK + " --top-p 2", 2, "decoding: top_p must be above 0 and at most 1, not 2.0"),
    (ASK + " --top-k-tokens 0", 2, "decoding: top_k_tokens must be a whole number from 1, not 0"),
    (ASK + " --repetition-penalty 0", 2, "decoding: repetition_penalty must be from 0.01 to 100 (1: none), not 0.0"),
    (ASK + " --seed -5", 2, "decoding: seed must be a whole number from 0"),
    (ASK + " --stop ''", 2, "decoding: stop must hold strings that are not empty"),
    (ASK + " --stream --json", 2, "cannot be used together"),
    (ASK + " --device abacus", 1, "Device 'abacus' is not available"),
    ("query ' ' --index {index}", 2, "The question is empty"),
    ("query 'Halden \udcff' --index {index}", 2, "The question is not valid Unicode text"),
    ("query zyzzyva --index {index}", 1, "No chunk of the index matches"),
    ("chat --index {index} --engine warp", 2, "Unknown engine 'warp'"),
    ("chat --index {index} --top-k 0", 2, "--top-k must be at least 1, not 0"),
    # what is looked at, or dropped
    ("show zyzzyva --index {index}", 2, "No chunk's id begins with 'zyzzyva'"),
    ("show halden.md:7 --index {index}", 2, "halden.md ends with chunk 0 (the first is 0); there is no 7"),
    ("show nobody.md:0 --index {index}", 2, "No document is called 'nobody.md'"),
    ("show *:0 --index {index}", 2, "means 2 documents"),
    ("show '' --index {index}", 2, "Name a chunk"),
    ("ls zyzzyva --index {index}", 2, "No document is called 'zyzzyva'"),
    ("ls --where title=X --index {index}", 2, "No document matches --where title=X"),
    ("stats --where source=x --index {index}", 2, "add --per-document"),
    ("delete --index {index}", 2, "Name the documents to delete"),
    ("delete bolt.txt --index {index}", 2, "needs --yes when stdin is not a terminal"),
    ("delete --where title=X --yes --index {index}", 2, "No document matches --where"),
    ("config show --index {index} --codec int4", 1, "was made with codec = raw, not int4"),
    ("doctor --index {index} --codecs ,", 2, "--codecs is empty"),
    ("tune {folder}/lines.jsonl --index {index}", 2, "line 2: not valid JSON"),
    ("tune {folder}/absent.jsonl --index {index}", 2, "No such file"),
]


def state(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file with its size and when it was written; locks come and go."""
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if "lock" not in path.name and path.is_file()
    }


def test_there_are_forty_and_more():
    assert len(TABLE) == len({line for line, _, _ in TABLE}) >= 40


@pytest.mark.parametrize(("line", "code", "says"), TABLE, ids=lambda value: value if isinstance(value, str) else None)
def test_bad_input_is_one_sentence_and_changes_nothing(ragkv: Any, place, tmp_path, monkeypatch, line, code, says):
    monkeypatch.setenv("COLUMNS", "80")
    arguments = [word.format(**place, new=tmp_path / "new") for word in shlex.split(line)]
    before = state(place["folder"])
    result = ragkv(*arguments)
    assert result.code == code, result.err
    assert says in result.err
    assert result.out == ""
    assert "Traceback" not in result.err
    errors = [text for text in result.err.splitlines() if text.startswith("ragkv: ")]
    assert errors == [result.sentence]
    assert result.sentence.endswith(".")
    assert state(place["folder"]) == before
    assert not (tmp_path / "new").exists()
