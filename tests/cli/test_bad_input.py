"""User errors: one sentence on stderr that says what to do, exit code 1 or 2, nothing on stdout, no traceback, and no
partial writes.
"""

import io
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarkfolder import beir_folder
from indexed import write_texts

from ragkv import RagKV
from ragkv.errors import RetrievalError

ASK = "query 'Who founded Halden Works?' --index {index}"
INTO = "ingest {documents} --model {model} --index {new}"
PLAN = "plan {documents} --model {model} --device cpu --engines block"
TUNE = "tune {folder}/questions.jsonl --index {index}"
DOCTOR = "doctor --index {index}"
CONTEXT = "query Who? --context {documents}/halden.md --context {documents}/bolt.txt --model {model}"
FINETUNE = "finetune block --model {model} --data {folder}/data.jsonl --output {new} --steps 1 --lora-rank 2"
BLOCKS = INTO + " --long-documents apb --engines apb --chunk-tokens 96 --block-tokens="
MANY = "query --index {index} --questions {folder}/questions.jsonl"
PIPED = "ingest - --index {new}"
SET = "config set --index {index} "
SERVE = "serve --index {index}"
EACH = ("query Who?", "ls", "stats", "verify", "repair", "gc", "delete x", "backup x", "compact --output x")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> dict[str, Path]:
    """An index that has answered before, so that a question stores nothing; and paths that are not indexes."""
    folder = tmp_path_factory.mktemp("place")
    documents = write_texts(folder / "documents")
    with RagKV.create(folder / "made", model=str(model_folder), device="cpu", chunk_tokens=128) as rag:
        rag.ingest(documents)
        rag.query("Who founded Halden Works?", max_new_tokens=1)
        rag.maintenance.backup(folder / "index")  # smaller than the map, so quick to copy
    with RagKV.open(folder / "index") as rag:  # a backup has no derived indexes; questions build them
        rag.query("Who founded Halden Works?", max_new_tokens=1, where=["source=*"])
    with RagKV.create(folder / "hollow", model=str(model_folder)) as rag, pytest.raises(RetrievalError):
        rag.query("Who founded Halden Works?")
    for broken in ("corrupt", "truncated", "garbled", "overset"):
        shutil.copytree(folder / "index", folder / broken)
    shutil.copytree(model_folder, folder / "broken")
    (folder / "broken" / "model.safetensors").write_bytes(b"\x07" * 100)
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
    (folder / "strange" / "broken.pdf").write_bytes(b"%PDF-1.4\nthis is not one")
    (folder / "strange" / "long.txt").write_text("Halden " * 2000)
    (folder / "lines.jsonl").write_text('{"question": "Who?"}\n{"question": ')
    (folder / "questions.jsonl").write_text('{"question": "Who founded Halden Works?", "answers": ["Mira"]}\n')
    (folder / "plain.jsonl").write_text('{"question": "Who?"}\n')
    (folder / "data.jsonl").write_text(json.dumps({"prompt": "Who?", "blocks": ["Bo.", "Ann."], "response": "Ann."}))
    beir_folder(folder / "tarn")
    return {"folder": folder, "index": folder / "index", "documents": documents, "model": model_folder}


TABLE: list[tuple[str, int, str]] = [
    # the command line itself
    ("conjure", 2, "No such command 'conjure'"),
    ("query Who? --topk 3", 2, "No such option: --topk"),
    ("query Who? --top-k many", 2, "a valid integer"),
    ("backup --index {index}", 2, "Missing argument 'DEST'"),
    ("query --index", 2, "requires an argument; see ragkv query --help"),
    ("ingest {documents} --ray --index {index}", 2, "Option '--ray' requires an argument; see ragkv ingest --help"),
    ("config set --index --json", 2, "Option '--index' requires an argument; see ragkv config set --help"),
    ("query Who? --system=--json --index {folder}/none", 2, "There is no index at"),
    (
        "show --index {index}",
        2,
        "Missing argument 'CHUNK' (a chunk's id or its start, or DOCUMENT:NUMBER (from 0)); see",
    ),
    ("tune --index {index}", 2, "Missing argument 'FILE.jsonl' (JSONL file"),
    ("ingest {documents} --index /proc/x --model {model}", 1, "/proc/x/store cannot be made (its file system takes no"),
    ("query Who founded Halden --index {index}", 2, "put it in quotes"),
    ("bench ttft --quick --dtype warp", 2, "--dtype must be one of auto, float32"),
    ("models {model} --dtype warp", 2, "--dtype must be one of auto, float32"),
    ("bench ttft --quick --tokens 512", 2, "--quick chooses --tokens by itself"),
    ("rm notes.md", 2, "No such command 'rm'"),
    ("--colour", 2, "No such option: --colour"),
    ("bench ttft --tokens a,b", 2, "is not a list of numbers"),
    ("compact --index {index}", 2, "Missing option '--output'"),
    # the index
    *(
        (f"{command} --index {{folder}}/{where}", code, says)
        for command in EACH
        for where, code, says in (
            ("nowhere", 2, "There is no index at"),
            ("documents", 2, "There is no index at"),
            ("documents/bolt.txt", 2, "is a file or below one"),
            ("corrupt", 1, "restore a backup"),
        )
    ),
    *(
        (f"{command} {where} --index {{index}}", 2, says)
        for command in ("backup", "compact --output")
        for where, says in (
            ("{documents}", "is not empty"),
            ("{documents}/bolt.txt", "is a file"),
            ("{index}/copy", "is inside the index"),
            ("{index}", "is inside the index"),
        )
    ),
    ("query Who? --index {folder}/truncated", 1, "restore a backup"),
    ("chat --index {folder}/garbled", 2, "not valid TOML"),
    (ASK.replace("{index}", "{folder}/overset") + " --engine ape", 2, "[tuning.ape]: unknown key 'warmth'"),
    ("query Who? --index {folder}/hollow", 1, "holds no document yet"),
    ("ingest {documents} --index {documents}/bolt.txt", 2, "is a file, and an index is a folder"),
    ("ingest {documents} --index {documents}", 2, "is not an index; choose another folder"),
    # what is ingested
    ("ingest {folder}/absent --index {index}", 2, "No such file or folder"),
    ("ingest https://ragkv.invalid/a.pdf --index {index}", 1, "the host ragkv.invalid is not known"),
    *(
        (f"ingest '{address}' --index {{index}}", 1, "Nothing to ingest")
        for address in ("http://", "http://[", "https://a b/", "http://u:p@example.org/", "http://x:99999/")
    ),
    ("ingest {documents} --max-pages 5 --index {index}", 2, "--max-pages and --allow-private are for pages of the web"),
    ("ingest --index {index}", 2, "Name what to ingest"),
    ("ingest --urls none.txt --index {index}", 2, "none.txt cannot be read"),
    ("ingest {documents} --watch --dry-run --index {index}", 2, "--watch follows folders"),
    ("ingest {documents}/bolt.txt --watch --index {index}", 2, "--watch follows folders"),
    ("plan s3://bucket/notes", 2, "s3://bucket/notes is an address, and only files and folders are read here"),
    ("ingest {folder}/strange/empty.txt --index {index}", 1, "empty file"),
    ("ingest {folder}/strange/broken.pdf --index {index}", 1, "PDF cannot be read"),
    ("ingest {folder}/nothing --index {index}", 1, "no supported files found"),
    ("ingest {documents} --index {index} --model mini", 1, "was made with model ="),
    ("ingest {documents} --index {index} --chunk-tokens 64", 1, "was made with chunk_tokens = 128, not 64"),
    (
        "ingest {documents} --index {index} --context-tokens 64",
        1,
        "was made with encoding = context 0, not context 64; use another --index, or leave --context-tokens out",
    ),
    ("ingest {documents} --model /no/model --index {new}", 1, "No model folder at"),
    ("ingest {documents} --model some/typo --index {new}", 1, "There is no model folder 'some/typo' here, and HF_HUB"),
    ("ingest {documents} --model {model}/config.json --index {new}", 1, "is a file; give the model's folder"),
    ("ingest {documents} --model {folder}/nothing --index {new}", 1, "config.json is missing"),
    ("ingest {documents} --model {folder}/broken --index {new}", 1, "cannot be loaded"),
    ("ingest {folder}/nothing --model {model} --index {new}", 1, "no supported files found"),
    ("ingest {folder}/strange/broken.pdf {folder}/strange/empty.txt --index {new}", 1, "Nothing to ingest: "),
    (INTO + " --embedder ./typo", 1, "No model folder at './typo'"),
    (INTO + " --embedder some/typo", 1, "There is no model folder 'some/typo' here"),
    (INTO + " --embedder {model}", 1, "lacks"),
    (INTO + " --reranker some/typo", 1, "There is no model folder 'some/typo' here"),
    (INTO + " --reranker {model}", 1, "has no classification head"),
    (INTO + " --device abacus", 1, "Device 'abacus' is not available"),
    (INTO + " --engines warp", 2, "Unknown engine 'warp'"),
    (INTO + " --codec brotli", 2, "unknown codec 'brotli'"),
    (INTO + " --chunk-tokens 2", 2, "chunk_tokens must be from 8 to 65536, not 2"),
    (INTO + " --context-tokens -1", 2, "encoding.context must be from 0 to 65536, not -1"),
    (INTO + " --dtype float8", 2, "dtype must be one of"),
    (INTO + " --retrieval dense", 2, "needs an embedder"),
    # no text is piped
    (PIPED + " --prune", 2, "- is not a folder"),
    (PIPED + " -", 2, "give - once"),
    (PIPED + " --type xls", 2, "No loader reads the type 'xls'; choose one of csv,"),
    (PIPED + " --name ''", 2, "choose another --name"),
    (PIPED + " /no/such", 2, "No such file or folder"),
    (PIPED.replace("-", "{documents}", 1) + " --name x", 2, "add - to read it"),
    (PIPED.replace("-", "{documents}", 1) + " --type md", 2, "add - to read it"),
    ("ingest - --index {index}", 1, "Nothing to ingest: stdin: binary file; say of what kind with --type"),
    ("ingest - --index {index} --type pdf", 1, "PDF cannot be read"),
    # long documents
    (BLOCKS, 2, "as in 4096,1024,512"),
    (BLOCKS + "long", 2, "as in 4096,1024,512"),
    (BLOCKS + "64,16", 2, "as in 4096,1024,512"),
    (BLOCKS + "64,16,8,4", 2, "as in 4096,1024,512"),
    (BLOCKS + "-64", 2, "as in 4096,1024,512"),
    (BLOCKS + "64,16.5,8", 2, "as in 4096,1024,512"),
    (BLOCKS + "0", 2, "a block holds at least 1 token"),
    (BLOCKS + "64,65,8", 2, "the anchor length must be from 0 to that of a block (64 tokens), not 65"),
    (BLOCKS + "64,16,65", 2, "the passing length must be from 0 to that of a block"),
    (BLOCKS + "9" * 5000, 2, "--block-tokens"),
    (INTO + " --long-documents star", 2, "--long-documents is apb or none, not 'star'."),
    (INTO + " --block-tokens 64,16,8", 2, "add --long-documents apb"),
    (INTO + " --long-documents none --engines apb --block-tokens 64,16,8", 2, "add --long-documents apb"),
    # many questions, or questions about files
    ("query --index {index} --top-k 2", 2, "Give one question"),
    (MANY + " Who?", 2, "Give one question"),
    (MANY, 2, "--questions needs --output"),
    (ASK + " --output a", 2, "--questions needs --output"),
    (MANY + " --output a --stream", 2, "--stream is for one question"),
    (MANY.replace("questions.jsonl", "garbled/ragkv.toml") + " --output a", 2, "line 1: not valid JSON"),
    (MANY.replace("questions.jsonl", "strange/empty.txt") + " --output a", 2, "holds no question"),
    (CONTEXT + " --index i", 2, "--index is for searching an index"),
    (CONTEXT + " --top-k 3", 2, "--top-k is for searching an index"),
    (CONTEXT + " --where source=x", 2, "--where is for searching an index"),
    (CONTEXT + " --context nowhere.txt", 2, "No such file"),
    (CONTEXT + " --context {folder}/strange/empty.txt", 1, "empty file"),
    (CONTEXT + " --context {folder}/strange/broken.pdf", 1, "broken.pdf"),
    (CONTEXT + " --context {folder}/strange/long.txt", 2, "positions; give less context"),
    (CONTEXT + " --engine pced --max-sequences 2", 2, "needs 3 sequences at a time, but --max-sequences is 2"),
    (CONTEXT + " --engine turbo", 2, "Unknown engine 'turbo'"),
    # questions
    (ASK + " --engine warp", 2, "Unknown engine 'warp'; choose one of apb, ape, blend, block, full"),
    (ASK + " --model mini", 1, "was made by model"),
    (ASK + " --retrieval psychic", 2, "--retrieval must be one of"),
    (ASK + " --retrieval dense", 1, "without an embedder"),
    (ASK + " --rerank", 1, "has no reranker"),
    (ASK + " --where source", 2, "--where takes FIELD=PATTERN"),
    (ASK + " --where source=zzz*", 2, "No document matches --where"),
    (ASK + " --temperature -1", 2, "ragkv: --temperature must be 0 (greedy) or from 0.0001 to 100, not -1.0"),
    (ASK + " --top-k-tokens 0", 2, "ragkv: --top-k-tokens must be a whole number from 1, not 0"),
    (ASK + " --regex=a --stop b", 2, "ragkv: --regex and --stop cannot be used together; leave one out."),
    (ASK + " --stop ''", 2, "ragkv: --stop must hold strings that are not empty"),
    (ASK + " --stream --json", 2, "cannot be used together"),
    (ASK + " --device abacus", 1, "Device 'abacus' is not available"),
    ("query ' ' --index {index}", 2, "The question is empty"),
    ("query 'Halden \udcff' --index {index}", 2, "The question is not valid Unicode text"),
    ("query zyzzyva --index {index}", 1, "No chunk of the index matches"),
    ("chat --index {index} --engine warp", 2, "Unknown engine 'warp'"),
    ("chat --index {index}", 2, "not UTF-8 text"),
    ("chat --index {index} --top-k 0", 2, "--top-k must be at least 1, not 0"),
    # inspection and deletion
    ("show zyzzyva --index {index}", 2, "No chunk's id begins with 'zyzzyva'"),
    ("show halden.md:7 --index {index}", 2, "halden.md ends with chunk 0 (the first is 0); there is no 7"),
    ("show nobody.md:0 --index {index}", 2, "No document is called 'nobody.md'"),
    ("show *:0 --index {index}", 2, "means 2 documents"),
    ("show '' --index {index}", 2, "Name a chunk"),
    ("ls zyzzyva --index {index}", 2, "No document is called 'zyzzyva'"),
    ("ls --where title=X --index {index}", 2, "No document matches --where title=X"),
    ("stats --where source=x --index {index}", 2, "add --per-document"),
    ("delete --index {index}", 2, "Name the documents to delete"),
    ("delete bolt.txt --index {index}", 2, "Deleting 1 document needs --yes when stdin is not a terminal."),
    ("delete --where title=X --yes --index {index}", 2, "No document matches --where"),
    ("config show --index {index} --codec int4", 1, "was made with codec = half, not int4"),
    # configuration, warming and serving
    (SET + "kv_budget=much", 2, "must be a number of bytes"),
    (SET + "kv=sometimes", 2, "must be one of all, on-demand"),
    (SET + "codec=raw", 2, "which config set does not change: ingest into another --index with --codec raw."),
    (SET + "top_k", 2, "'top_k' is not NAME=VALUE, as in top_k=4; NAME is one of kv, kv_budget"),
    (SET + "retrieval=dense", 2, "config set does not change retrieval: edit "),
    (SET + "tuning.pced.gamma=2", 2, "config set does not change tuning.pced.gamma: edit "),
    (SET + "default_engine=nobody", 2, "nobody"),
    (SET + "top_k=-1", 2, "top_k must be at least 1"),
    (SET + "top_k=" + "9" * 5000, 2, "top_k must be a whole number, not '999"),
    (SET + "top_k=3 top_k=4", 2, "top_k is given twice"),
    (SET + "'prompt.system=Be brief.'", 2, "comes before the documents, whose KV depends on it: change it in"),
    (SET + "prompt.question=What?", 2, "prompt.question must hold {question} exactly once"),
    (SET + "prompt.none=1", 2, "There is no setting 'prompt.none'; NAME in NAME=VALUE is one of kv, "),
    (SET + "engine=full", 2, "'engine' is the setting default_engine: write default_engine=full."),
    (SET + "top-k=3", 2, "'top-k' is the setting top_k: write top_k=3."),
    (SET + "steps.count=9", 2, "steps.count must be from 1 to 8, not 9"),
    (SET + "steps.count=two", 2, "steps.count"),
    ("ingest {documents} --kv-budget 1GB --index {index}", 1, "ragkv config set kv_budget=1GB --index /"),
    ("warm --index {index}", 2, "one of them"),
    ("warm a* --most 2 --index {index}", 2, "one of them"),
    ("warm nothing --index {index}", 2, "No document is called 'nothing'"),
    ("warm --questions nowhere.jsonl --index {index}", 2, "No such file"),
    (SERVE + " --host 0.0.0.0", 2, "--keys"),
    (SERVE + " --allow-origin https://page.example/", 2, "https://example.org, not 'https://page.example/'"),
    (SERVE + " --index none", 2, "There is no index at"),
    (SERVE + " --new-key ann", 2, "--keys FILE"),
    (SERVE + " --keys /dev/null", 2, "cannot be read"),
    ("query --index {index} --questions questions.jsonl --output -", 2, "not to stdout"),
    ("pack - --index {index}", 2, "not to stdout"),
    ("unpack {documents}/bolt.txt --index {documents}/bolt.txt", 2, "is a file; name a folder"),
    ("unpack file://{documents}/nowhere/a.ragkv --index new", 2, "There is no pack at /"),
    ("unpack memory://bucket/a.ragkv --index new", 2, "There is no pack at memory://bucket/a.ragkv"),
    # what is judged
    (DOCTOR + " --codecs ,", 2, "--codecs is empty"),
    (DOCTOR + " --codecs brotli", 2, "brotli"),
    (DOCTOR + " --questions /no/file", 2, "No such file: /no/file"),
    (DOCTOR + " --questions {documents}", 2, "cannot be read (Is a directory); give"),
    (MANY.replace("{folder}/questions.jsonl", "{documents}") + " --output x", 2, "cannot be read (Is a directory)"),
    (DOCTOR + " --engines warp", 2, "Unknown engine 'warp'"),
    (DOCTOR + " --engines ,", 2, "names nothing; write a list"),
    (DOCTOR + " --engines full", 2, "no engine to compare with full"),
    (DOCTOR + " --model /no/model", 1, "No model folder at"),
    (DOCTOR + " --device abacus", 1, "Device 'abacus' is not available"),
    ("doctor --index {folder}/hollow", 1, "holds no chunk; run ragkv ingest PATH"),
    ("doctor --index {folder}/none", 2, "There is no index at"),
    ("doctor --quick", 2, "There is no index at"),
    (DOCTOR + " --health --quick", 2, "--health compares nothing"),
    # planning, measuring and tuning
    (PLAN + " --folder /nowhere", 2, "/nowhere is not a folder"),
    (PLAN + " --codec zip", 2, "unknown codec 'zip'"),
    (PLAN + " --seconds 0", 2, "--seconds"),
    (PLAN + " --seconds nan", 2, "--seconds"),
    (PLAN + " --seconds inf", 2, "--seconds must be more than 0, not inf"),
    (PLAN + " --engines full", 2, "stores no KV, so there is nothing to plan"),
    ("tune {folder}/plain.jsonl --index {index}", 2, "has no gold answers"),
    (TUNE + " --holdout", 2, "--holdout needs at least two questions"),
    ("models {folder}/none", 1, "No model folder at"),
    # training
    (FINETUNE + " --full-weights", 2, "either --lora-rank or --full-weights"),
    (FINETUNE + " --sink all", 2, "sink must be one of"),
    (FINETUNE + " --bos never", 2, "prompt.bos must be one of auto, none"),
    (FINETUNE + " --bos none --sink bos", 2, 'The sink "bos" needs a BOS'),
    (FINETUNE + " --full-share 2", 2, "full_share must be between 0 and 1"),
    (FINETUNE + " --lr nan", 2, "learning_rate must be above 0"),
    (FINETUNE + " --device abacus", 1, "Device 'abacus' is not available"),
    (FINETUNE + " --model ./none", 1, "No model folder at './none'"),
    (FINETUNE + " --eval-data none.jsonl", 2, "none.jsonl cannot be read"),
    (FINETUNE + " --prompt-of none", 2, "There is no index at none"),
    ("tune {folder}/lines.jsonl --index {index}", 2, "line 2: not valid JSON"),
    ("tune {folder}/absent.jsonl --index {index}", 2, "No such file"),
]


def state(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file with its size and modification time, without locks."""
    paths = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names if "lock" not in name)
    return {str(path): ((stat := path.stat()).st_size, stat.st_mtime_ns) for path in paths}


@pytest.mark.usefixtures("read_here")
@pytest.mark.parametrize(
    ("line", "code", "says"), TABLE, ids=lambda value: value[:99] if isinstance(value, str) else None
)
def test_bad_input_is_one_sentence_and_changes_nothing(ragkv: Any, place, tmp_path, monkeypatch, line, code, says):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(bytes(range(256)))))
    arguments = [word.format(**place, new=tmp_path / "new") for word in shlex.split(line)]
    before = state(place["folder"])
    result = ragkv(*arguments)
    assert result.code == code, result.err
    assert says in result.err
    late = line.startswith("doctor") and any(word in line for word in ("hollow", "--model", "--device"))
    assert not result.out or late  # the doctor tells of the machine before it loads anything
    assert "Traceback" not in result.err
    errors = [text for text in result.err.splitlines() if text.startswith("ragkv: ")]
    assert errors == [result.sentence]
    assert result.sentence.endswith(".")
    assert "[Errno" not in result.sentence
    assert len(result.sentence) < 1000
    assert state(place["folder"]) == before
    assert list(tmp_path.iterdir()) == []
