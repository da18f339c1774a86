"""Documents, names, models and questions with control characters: none reaches a terminal or a pipe unescaped."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from clichild import run_script
from nightly import NIGHTLY

from ragkv import RagKV
from ragkv.config import PromptConfig

# clipboard access, reset, title, concealed text, cleared screen, C1's CSI, bidi and invisible marks, markup, emoji
EVIL = (
    "\x1b]52;c;SGk=\x07 \x1bc\x1b]0;owned\x1b\\\x1b[8m\x1b[2J\x9b31m\x7f\x08\r\u202egpj\u2066\u2069\u200f\u061c\u2028"
    "\u2029\ufeff\U000e0041[red]R[/red][/link][link=x]L :bug: "
)
WORDS = f"# Heading {EVIL}\n\nHalden Works was founded by {EVIL} Mira Oskel in 1907.\tA tab.\n"
TEXT = json.dumps({"title": f"Title {EVIL}", "text": WORDS})
OURS = re.compile(r"\x1b\[(?:[0-7]|3[0-79]|38;[25](?:;\d+)+|[349]\d|;)*m|\x1b\[(?:2K|1A|\?25[lh])")
"""Sequences that rich writes: colours and weights (never concealed), clearing a bar's line, moving up, the cursor."""
RAW = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> dict[str, Path]:
    """An index in which every name is hostile; one file name is not UTF-8."""
    folder = tmp_path_factory.mktemp("place")
    evil = EVIL.replace("/", "")
    documents = folder / f"docs {evil}\n"
    documents.mkdir()
    (documents / f"halden {evil}\nsecond row.jsonl").write_text(TEXT)
    (documents / f"skipped {evil}\n.png").write_bytes(b"x")
    (documents / f"odd.{evil[:9]}\n").write_bytes(b"x")
    Path(os.fsdecode(os.fsencode(documents) + b"/un\xff\x9b.md")).write_text("never read")
    (documents / "plain.md").write_text("Halden Works makes valves.")
    asked = [{"id": EVIL, "question": f"Who founded Halden Works {EVIL}?"}, {"question": EVIL}]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, asked)))
    model = folder / f"model {evil}\n"
    shutil.copytree(model_folder, model)
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 4096}  # EVIL is long
    (model / "config.json").write_text(json.dumps(config))
    prompt = PromptConfig(system=f"Answer {EVIL}\r\nbriefly.")
    with RagKV.create(folder / f"index {evil}\n", model=str(model), device="cpu", prompt=prompt) as rag:
        rag.ingest(documents)
    return {"folder": folder, "documents": documents, "index": folder / f"index {evil}\n", "model": model}


def commands(place: dict[str, Path], way: str) -> list[dict[str, Any]]:
    """Every command that shows untrusted text; `way` names the output, so that both runs can exist."""
    folder, index, evil = place["folder"], ["--index", str(place["index"])], EVIL.replace("/", "")
    ask = [*index, "--max-new-tokens", "24", "--engine"]
    lines: list[list[str]] = [
        ["ingest", str(place["documents"]), *index],
        ["ingest", str(place["documents"]), *index, "--json"],
        ["ingest", str(place["documents"]), *index, "--dry-run"],
        ["ingest", str(folder / f"absent {EVIL}"), *index],
        ["ingest", str(place["documents"]), *index, "--codec", f"zstd{EVIL}"],
        ["ls", *index],
        ["ls", *index, "--quiet"],
        ["ls", *index, "--json"],
        ["ls", f"nobody {EVIL}", *index],
        ["stats", *index, "--per-document"],
        ["stats", *index, "--per-document", "--json"],
        ["show", "*halden*:0", *index],
        ["show", "*halden*:0", *index, "--json"],
        ["show", "*halden*:0", *index, "--quiet"],
        ["query", "Who founded Halden Works?", *ask, "full"],
        ["query", f"Halden Works {EVIL}", *ask, "block", "--stream"],
        ["query", f"Halden Works {EVIL}", *ask, "ape", "--json"],
        ["query", "Who?", *index, "--engine", EVIL],
        ["query", "Who?", *index, "--where", f"source={EVIL}"],
        ["query", "\udcff", *index],
        ["query", "Who?", *index, "--model", EVIL],
        ["query", "--questions", f"{folder}/questions.jsonl", "--output", f"{folder}/{way} {evil}.jsonl", *index],
        ["query", "Who?", f"--{EVIL}"],
        ["query", "Who?", *index, "--top-k", EVIL],
        [f"conjure{EVIL}"],
        ["--debug", "query", "Who?", "--index", f"{folder}/none {EVIL}"],
        ["verify", *index],
        ["gc", *index, "--dry-run"],
        ["repair", *index, "--dry-run"],
        ["delete", "*halden*", *index, "--dry-run"],
        ["delete", f"{EVIL}*", *index],
        ["backup", f"{folder}/{way} {evil}", *index, "--json"],
        ["compact", "--output", f"{folder}/{way} compact {evil}", *index],
        ["doctor", "--health", *index],
        ["doctor", "--health", *index, "--json"],
        ["config", "show", *index],
        ["config", "show", *index, "--json"],
        ["config", "show", *index, "--codec", EVIL],
    ]
    chat = f"Who founded Halden Works {EVIL}?\n/sources\n/engine {EVIL}\n/nothing {EVIL}\n/engine\n".replace("\r", "")
    spoken = [
        {"arguments": ["chat", *ask, "block"], "stdin": chat},
        {"arguments": ["chat", *ask, "block", "--json"], "stdin": chat},
        {"arguments": ["ingest", "-", "--name", f"piped {EVIL}", *index, "--dry-run"], "stdin": "Halden"},
    ]
    payload = [{"arguments": line} for line in lines] + spoken
    return [
        each | {"terminal": terminal}
        for each in payload
        for terminal in (False, True)
        if NIGHTLY or terminal != _read_by_programs(each["arguments"])
    ]


def _read_by_programs(arguments: list[str]) -> bool:
    return bool({"--json", "--quiet", "--output"} & {*arguments})


@pytest.mark.slow
def test_no_command_hands_a_control_character_on(place, tmp_path, monkeypatch):
    payload = commands(place, "made")
    for name, value in {"XDG_CONFIG_HOME": str(tmp_path), "TERM": "xterm-256color", "COLUMNS": "120"}.items():
        monkeypatch.setenv(name, value)
    results = json.loads(run_script("command", "plain", place["index"], stdin=json.dumps(payload)))
    seen = 0
    for asked, result in zip(payload, results, strict=True):
        line, terminal = asked["arguments"], asked["terminal"]
        traced = "--debug" in line
        assert result["code"] in ((70,) if traced else (0, 1, 2)), (line, result)
        assert ("Traceback" in result["err"]) == traced, (line, result["err"])
        for stream in ("out", "err"):
            text = result[stream]
            if terminal:
                text = OURS.sub("", text.replace("\r\n", "\n")).replace("\r", "")  # a bar rewrites its line
            assert RAW.findall(text) == [], (line, stream, text)
            seen += "\\x1b" in text or "\\u001b" in text
            if "--json" in line and stream == "out" and result["code"] == 0:
                for one in [text] if line[0] != "chat" else text.splitlines():
                    json.loads(one)
        if result["code"] and not traced and line[0] != "chat":
            sentences = [message for message in result["err"].splitlines() if "ragkv: " in message]
            assert len(sentences) == 1, (line, result["err"])
        answered = line[:1] == ["query"] and {"full", "block", "ape", "--questions"} & {*line}
        assert not answered or result["code"] == 0, (line, result["err"])
    assert seen > len(payload) // 2
    piped = {
        " ".join(asked["arguments"]): each["out"]
        for asked, each in zip(payload, results, strict=True)
        if not asked["terminal"]
    }
    index = place["index"]
    rows = piped[f"ls --index {index} --quiet"].splitlines()
    assert len(rows) == 2, rows  # one row per document, whatever its name
    found = json.loads(piped[f"ls --index {index} --json"])["documents"]
    assert any(one["source"].endswith("\nsecond row.jsonl") and EVIL.replace("/", "") in one["source"] for one in found)
    [answers] = place["folder"].glob("made *.jsonl")
    written = answers.read_text()
    assert RAW.findall(written) == []
    assert json.loads(written.splitlines()[0])["id"] == EVIL
