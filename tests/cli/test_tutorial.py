"""docs/tutorial.md, executed as written: its output blocks show what the commands print."""

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
VARIES = re.compile(
    r"\d[\d,.]* (?:ms|s\b|tokens/s|questions/s)"  # times and rates
    r"|(?<=load )\d+|(?<=saved seconds) +[\d.]+"
    r"|(?<=kv hits) +\d+"  # depends on the questions asked before
    r"|^\[\d\](?= .*\(score )"  # equal scores are ordered by ids, which depend on the path
    r"|(?<=file bytes|used bytes|free bytes) +[\d.]+"  # LMDB's free pages count too
    r"|\d+(?= read from the store)"  # the runtime may still hold them in memory
)

UNHURRIED = {"plan": ["--seconds", "100000"]}
"""Additional options of commands: a plan would skip what a slow machine has no time for."""


def lines(text: str) -> list[str]:
    return sorted(VARIES.sub("#", line.rstrip()) for line in text.splitlines() if line.strip())


def first_words(plan: str) -> list[str]:
    """The first words of a plan's lines, without those on speed."""
    return re.findall(r"^\w+", re.split("No verdict|Over ", plan)[0], re.MULTILINE)


def blocks(language: str = "") -> list[str]:
    return [text for of, text in FENCE.findall(PAGE) if of == language]


def commands() -> Iterator[tuple[list[str], str]]:
    """Each `ragkv` command of the page with the output shown below it."""
    for block in blocks():
        for typed in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, shown = typed.partition("\n")
            if command.startswith("ragkv "):
                yield shlex.split(command)[1:], shown


def without_path(answer: dict[str, object]) -> dict[str, object]:
    """A JSON answer with its first source, without times and without the id that depends on the file's path."""
    [first, *_] = answer["sources"]  # type: ignore[misc]
    return {**answer, "sources": [{**first, "chunk_id": ""}], "timing_ms": [*answer["timing_ms"]]}  # type: ignore[misc]


@pytest.mark.slow
def test_the_tutorial_shows_what_is_printed(ragkv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAGKV_DTYPE", "bfloat16")  # the default on a processor without bfloat16 units is float32
    shutil.copytree(ROOT / "examples" / "corpus", "corpus")
    questions = (ROOT / "examples" / "questions.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    Path("some.jsonl").write_text("".join(questions[:4]), encoding="utf-8")
    typed = list(commands())
    for words, shown in typed:
        done = ragkv(*words, *UNHURRIED.get(words[0], ()))
        assert done.code == 0, done.err
        if words[0] == "plan":
            assert first_words(done.out) == first_words(shown)
        elif "--json" in words:
            assert without_path(json.loads(done.out)) == without_path(json.loads(shown))
        else:
            assert lines(done.out + done.err) == lines(shown), words
    assert len(typed) == 10
    [program] = blocks("python")
    with redirect_stdout(StringIO()) as printed:
        exec(program, {})
    assert printed.getvalue().startswith("Linodyne Paper employs 360 people. ['companies/linodyne-paper.md', ")
