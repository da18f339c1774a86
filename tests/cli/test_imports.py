"""The modules that a command imports: importing torch takes longer than most commands. No times are compared."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from clichild import CliChild

from ragkv import RagKV

HEAVY = ["torch", "transformers", "faiss", "FlagEmbedding", "scipy", "pandas", "bm25s", "tokenizers", "huggingface_hub"]
PROGRAM = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from ragkv.cli.main import main

heavy, commands = {*json.loads(sys.argv[1])}, json.loads(sys.argv[2])
loaded = []
for words in commands:
    sys.argv = ["ragkv", *words]
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as told:
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
    loaded.append([code, told.getvalue() if code else "", sorted(heavy & {*sys.modules})])
print(json.dumps(loaded))
"""


def loaded(*commands: list[str], heavy: list[str] = HEAVY) -> list[list[object]]:
    """Run commands one after another in a process; returns each one's exit code, error and imported heavy modules."""
    words = [sys.executable, "-c", PROGRAM, json.dumps(heavy), json.dumps(commands)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[list[object]] = json.loads(done.stdout)
    return found


def test_commands_that_look_at_an_index_load_no_torch(
    index: Path, tmp_path: Path, documents: Path, model_folder: Path
) -> None:
    with RagKV.create(tmp_path / "lossy", model=str(model_folder), device="cpu", codec="int8") as rag:
        rag.ingest(documents)
    of = ["--index", str(index)]
    commands = [
        ["--help"],
        ["query", "--help"],
        ["bench", "--help"],
        ["ls", *of],
        ["ls", "--index", str(tmp_path / "lossy")],
        ["stats", "--per-document", *of],
        ["config", "show", *of],
        ["show", "halden.md:0", *of],
        ["gc", "--dry-run", *of],
        ["verify", *of],
        ["delete", "bolt.txt", "--yes", *of],
    ]
    for command, found in zip(commands, loaded(*commands), strict=True):
        assert found == [0, "", []], command


def test_names_are_completed_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "_RAGKV_COMPLETE": "complete_bash",
        "COMP_WORDS": "ragkv query --engine p",
        "COMP_CWORD": "3",
    }.items():
        monkeypatch.setenv(name, value)
    assert loaded([]) == [[0, "", []]]


def test_a_command_loads_no_other_command(index: Path) -> None:
    """And no module that only a server, a progress bar or a version needs."""
    others = ["bench", "evaluate", "finetune", "doctor", "ingest", "plan", "serve", "chat"]
    needless = [*(f"ragkv.cli.{name}" for name in others), "http.client", "rich.progress", "markdown_it", "ssl"]
    commands = [["ls", "--index", str(index)], ["config", "show", "--index", str(index)]]
    assert loaded(*commands, heavy=[*HEAVY, *needless]) == [[0, "", []]] * 2
    rendering = ["http.client", "ssl", "rich.progress", "importlib.metadata", "ragkv.ingest", "ragkv.store"]
    package = ["numpy", "lmdb", "llama_index"]  # `import ragkv` by itself imports little
    assert loaded(["--help"], heavy=[*HEAVY, *rendering, *package]) == [[0, "", []]]


def test_wrong_options_are_refused_before_torch_is_loaded(index: Path) -> None:
    asked = ["query", "Who founded Halden Works?", "--index", str(index)]
    options = ("--top-k", "--candidates", "--max-new-tokens")
    refused = [[2, f"ragkv: {option} must be at least 1, not 0.\n", []] for option in options]
    assert loaded(*([*asked, option, "0"] for option in options)) == refused


@pytest.mark.skipif(
    torch.cuda.is_available() or find_spec("llama_cpp") is not None,
    reason="there is a GPU, or llama.cpp may have one",
)
def test_a_gpu_that_cannot_be_there_is_refused_before_torch_is_loaded() -> None:
    typed = ("query Who?", "chat", "doctor", "plan .", "serve --port 0")
    asked = [(line, device) for line in typed for device in ("cuda", "cuda:1", "cuda:0,cuda:1")]
    results = loaded(*([*line.split(), "--device", device] for line, device in asked))
    for (line, device), (code, result, found) in zip(asked, results, strict=True):
        assert (code, found) == (1, []), line
        assert str(result).startswith(f"ragkv: Device '{device}' is not available: "), line
        assert str(result).endswith("leave --device out to use the CPU.\n"), line


def test_a_question_to_a_model_that_was_checked_loads_torch_and_little_else(index: Path) -> None:
    """Neither transformers nor torch's compiler, nor a library for another search or another door."""
    asked = ["query", "Who founded Halden Works?", "--index", str(index), "--device", "cpu", "--no-server"]
    needless = [
        "torch._dynamo",
        "torch.distributed.tensor",
        "llama_index",
        "fastapi",
        "accelerate",
        "pypdfium2",
    ]
    others = [name for name in (*HEAVY, *needless) if name not in ("torch", "bm25s", "tokenizers", "scipy")]
    assert CliChild(*asked).end()[0] == 0  # it checks the model
    assert loaded([*asked, "--max-new-tokens", "12"], heavy=others) == [[0, "", []]]
