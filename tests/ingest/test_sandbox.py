"""Malicious files: each is read, or skipped with a reason, in bounded memory."""

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from bomb import BOMBS
from reading import outcome

from ragkv.ingest import sandbox
from ragkv.ingest.parser import ParseLimits
from ragkv.ingest.sandbox import SourceReader, SourceText, read_source
from ragkv.ingest.source import find_sources

VALVES = "<p>Halden Works makes valves.</p>"
LIMITS = ParseLimits(file=64 << 20, characters=1_000_000, memory=700 << 20, seconds=1)
REASONS = {
    "attributes.docx": "more than 3,000,000 elements",
    "merged.docx": "longer than 1,000,000 characters",
    "loop.pdf": "page 1: damaged structure",
    "spans.html": "",
    "tag.html": "more than 5,000 attributes",
    "tag-utf16.html": "more than 5,000 attributes",
    "wide.csv": "longer than 1,000,000 characters",
    "field.csv": "longer than 1,000,000 characters",
    "rows.csv": "longer than 1,000,000 characters",
    "paths.jsonl": "longer than 1,000,000 characters",
    "number.json": "a number too long",
    "many-headings.md": "more than 31,250 pages, headings or rows",
    "line.txt": "longer than 1,000,000 characters",
    "zeros.txt": "larger than 67,108,864 bytes, which is ingest.max_file",
}


@pytest.fixture(scope="module")
def reader() -> Iterator[SourceReader]:
    with SourceReader(replace(LIMITS, memory=256 << 20)) as made:
        yield made


@pytest.fixture(scope="module")
def patient() -> Iterator[SourceReader]:
    """A reader for files that hit another limit: the time limit is out of reach on any machine."""
    with SourceReader(replace(LIMITS, seconds=3600)) as made:
        yield made


def read(reader: SourceReader, path: Path) -> SourceText | str:
    [source], _ = find_sources([path])
    return outcome(source, reader.read)


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb(name, reader, patient, tmp_path):
    (tmp_path / name).write_bytes(BOMBS[name]())
    found = read(patient if REASONS.get(name) else reader, tmp_path / name)
    if isinstance(found, SourceText):
        assert name not in REASONS or not REASONS[name]
        assert len(found.text) <= LIMITS.characters
        assert sum(len(section.heading or "") for section in found.sections) <= LIMITS.characters
    else:
        assert REASONS.get(name, "") in found
        assert "\n" not in found


def test_too_much_memory_and_too_long_cost_one_file(tmp_path):
    # Empty lists: three bytes each take 60 bytes of memory.
    (tmp_path / "a.json").write_bytes(b"[" + b"[]," * 1_500_000 + b"[]]")
    (tmp_path / "b.html").write_bytes(b"<ul>" + b"<li>a" * 200_000)  # seconds, where other files take a fifth of one
    (tmp_path / "c.html").write_text(VALVES)
    tight = replace(LIMITS, characters=16_000_000, memory=64 << 20, seconds=3600)
    brief = replace(LIMITS, seconds=0)  # plus the second that every file gets
    for name, limits, reason in (
        ("a.json", tight, "takes more than 64 MiB of memory to read, which is ingest.max_memory"),
        ("b.html", brief, "takes more than 0 s of computing to read: raise ingest.max_seconds"),
    ):
        with SourceReader(limits) as reader:
            assert read(reader, tmp_path / name) == reason
            reader._limits = replace(LIMITS, seconds=3600)  # long enough on any machine
            found = read(reader, tmp_path / "c.html")
        assert isinstance(found, SourceText)
        assert "valves" in found.text


def test_a_process_that_is_gone_costs_one_file(tmp_path):
    (tmp_path / "a.html").write_text(VALVES)
    with SourceReader() as reader:
        assert isinstance(read(reader, tmp_path / "a.html"), SourceText)
        process = reader._process
        assert process is not None
        os.kill(process.pid, 15)
        process.wait()
        assert read(reader, tmp_path / "a.html") == "cannot be read: the process that read it ended by signal 15"
        assert isinstance(read(reader, tmp_path / "a.html"), SourceText)
    assert reader._process is None


def test_half_an_answer_is_none(tmp_path, monkeypatch):
    (tmp_path / "a.html").write_text(VALVES)
    half = (
        "import os, sys; os.read(0, 1); os.write(1, (100).to_bytes(8, sys.byteorder) + b'{\"text\": '); "
        "os.kill(os.getpid(), 9)"
    )
    monkeypatch.setattr(sandbox, "_START", half)
    with SourceReader(LIMITS) as reader:
        assert "takes more than 700 MiB of memory" in str(read(reader, tmp_path / "a.html"))


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits for a process that is not its child")
def test_the_process_ends_with_the_one_that_started_it(tmp_path):
    """A killed ingest leaves no reader process, however long that would read."""
    script = (
        "from ragkv.ingest import sandbox\nfrom ragkv.ingest.sandbox import LENGTH, SourceReader\n"
        "endless = 'import ragkv.ingest.sandbox as s; s._answer = lambda *_: [1 for _ in iter(int, 1)]; '\n"
        "sandbox._START = sandbox._START.replace('main()', endless + 'main()')\n"
        "process = SourceReader()._start(None)\n"
        "process.stdin.write(LENGTH.pack(2) + b'{}')\nprocess.stdin.flush()\n"
        "print(process.pid, flush=True)\nprocess.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        reading = int(parent.stdout.readline())
        watch = os.pidfd_open(reading)
        parent.kill()
    with os.fdopen(watch):
        ended, _, _ = select.select([watch], [], [], 600)
        assert ended


def test_the_same_is_read_as_in_this_process(tmp_path):
    (tmp_path / "a.html").write_text(f"<html><title>T</title><body><h1>Guide</h1>{VALVES}")
    (tmp_path / "b.csv").write_text("name,city\n" + f"Halden,{'Varn ' * 40}\n" * 6000)
    with SourceReader() as reader:
        for name in ("a.html", "b.csv"):
            [source], _ = find_sources([tmp_path / name])
            assert reader.read(source) == read_source(source)


def test_a_file_may_be_allowed_more_bytes_than_there_is_memory(tmp_path):
    """A small file is read with any `max_file`; allocating that much at once made every file fail."""
    (tmp_path / "a.md").write_text("The mill is old.")
    for limits in (replace(LIMITS, file=1 << 62), replace(LIMITS, file=512 << 20, memory=128 << 20)):
        with SourceReader(limits) as reader:
            found = read(reader, tmp_path / "a.md")
        assert isinstance(found, SourceText), found
        assert found.text.strip() == "The mill is old."
