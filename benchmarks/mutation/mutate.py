"""Plant one small fault at a time and see whether the tests notice: a check of the tests, run by hand, not in CI.

    .venv/bin/python benchmarks/mutation/mutate.py [ROOM | PATH ...] [--list FILE] [--dry]

`mutants.toml` lists the faults by room: a file, the exact text that is replaced, its replacement, and the pytest
arguments that should then fail; nothing else is run. Faults are planted in a copy of the working tree in a temporary
folder, never in the tree itself.

killed      a test failed, or none ended in time
survived    no test failed: write one that states what should have held, or note in the list why no test can tell
            (`equivalent = "..."`)
equivalent  survived, and the list says why
broken      the list is wrong: the text is not in the file exactly once (the code was rewritten), the tests do not
            exist or fail without the fault, or a mutant called equivalent was killed

Exit code 0 when all are killed or equivalent, else 1.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.toml")
SECONDS = 300
"""The most seconds for the tests of one mutant; a fault that causes an endless loop is detected by it."""
FORKS = multiprocessing.get_context("forkserver")
"""Loading torch takes longer than most of the tests, so each run is a fork of a process that has loaded it."""
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
LOADED = ("numpy", "torch", "tokenizers", "transformers.models.llama.modeling_llama", "pytest", "hypothesis", "fastapi")
ENDLESS = -1
FIRST = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One fault: in `file`, `old` becomes `new`, and one of `tests` should fail. `place` is its number in the room."""

    room: str
    place: int
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""

    @property
    def names(self) -> set[str]:
        """The names by which it can be chosen: its room, its number there, its file and that file's folders."""
        return {self.room, f"{self.room}:{self.place}", self.file, *map(str, Path(self.file).parents)}

    def __str__(self) -> str:
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.room} {self.place}: {old}  ->  {new or '(nothing)'}"


class TreeCopy:
    """A copy of the working tree's tracked and new files, and a way to import `ragkv` from it."""

    def __init__(self, folder: Path) -> None:
        self.tree, self._site, self.output = folder / "tree", folder / "site", folder / "output.txt"
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        for name in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0"):
            if name and (ROOT / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.tree / name)
        # setuptools' package-dir, as links: `ragkv` is made of several top-level folders
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        packages: dict[str, str] = project["tool"]["setuptools"]["package-dir"]
        for package in sorted(packages):
            source, target = self.tree / packages[package], self._site / package.replace(".", "/")
            if "." in package:
                target.symlink_to(source)
                continue
            target.mkdir(parents=True)
            for child in source.iterdir():
                (target / child.name).symlink_to(child)

    def test(self, arguments: tuple[str, ...]) -> int:
        """pytest's exit code for these arguments, or `ENDLESS`."""
        child = FORKS.Process(target=_pytest, args=(self.tree, self._site, self.output, arguments))
        child.start()
        try:
            child.join(SECONDS)
        finally:
            if late := child.exitcode is None:
                os.killpg(child.pid or 0, signal.SIGKILL)  # it leads its own process group, with everything it started
                child.join()
        return ENDLESS if late else child.exitcode or 0


def _pytest(tree: Path, site: Path, log: Path, arguments: tuple[str, ...]) -> None:
    """One run of pytest over the copy, in a process that has torch and transformers already."""
    os.setsid()
    os.chdir(tree)
    with log.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    # the copy comes before installed packages; the caller's folders are removed: the tree's own `ragkv/` is incomplete
    sys.path = [str(site), *(path for path in sys.path if path and Path(path) not in (LIST.parent, ROOT))]
    os.environ |= {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}  # for tests that start a Python of their own

    import hypothesis
    import pytest

    import ragkv.attention
    import ragkv.store

    # one failure is enough, so examples are not shrunk; the tests' own profile replaces the other settings
    hypothesis.settings.register_profile("any", phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate))
    hypothesis.settings.load_profile("any")

    for module in (ragkv.store, ragkv.attention):
        assert Path(module.__file__ or "").resolve().is_relative_to(tree.resolve()), module
    raise SystemExit(int(pytest.main([*OPTIONS, *arguments])))


def mutants(listed: Path) -> Iterator[Mutant]:
    """The mutants of the list, in order."""
    for room in tomllib.loads(listed.read_text(encoding="utf-8"))["room"]:
        for place, entry in enumerate(room["mutants"], 1):
            yield Mutant(
                room=room["name"],
                place=place,
                file=entry.get("file", room["file"]),
                old=entry["old"],
                new=entry["new"],
                tests=tuple(entry.get("tests", room["tests"])),
                equivalent=entry.get("equivalent", ""),
            )


def lost(copy: TreeCopy, mutant: Mutant) -> str:
    """Why the mutant cannot be planted: code or tests were moved or rewritten. Empty if it can."""
    path = copy.tree / mutant.file
    for test in mutant.tests:
        if test.startswith("tests/") and not (copy.tree / test.partition("::")[0]).exists():
            return f"its tests {test} do not exist"
    if not path.is_file():
        return f"{mutant.file} does not exist"
    found = path.read_text(encoding="utf-8").count(mutant.old)
    return "" if found == 1 else f"its text is {found} times in {mutant.file}; it must be there once"


def judge(copy: TreeCopy, mutant: Mutant, unharmed: dict[tuple[str, ...], int]) -> tuple[str, str]:
    """The verdict on one mutant, and a reason: the test that failed, or what is wrong with the list.

    `unharmed` caches the exit code of these tests without a fault, once for all mutants that use them.
    """
    if reason := lost(copy, mutant):
        return "broken", reason
    if mutant.tests not in unharmed:
        unharmed[mutant.tests] = copy.test(mutant.tests)
    if code := unharmed[mutant.tests]:
        return "broken", f"without a fault, pytest {' '.join(mutant.tests)} exits with {code}: mend that first"
    path = copy.tree / mutant.file
    honest = path.read_text(encoding="utf-8")
    path.write_text(honest.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        code = copy.test(mutant.tests)
    finally:
        path.write_text(honest, encoding="utf-8")
    if code == 0:
        return ("equivalent", "") if mutant.equivalent else ("survived", "")
    by = "not in time" if code == ENDLESS else next(iter(FIRST.findall(copy.output.read_text(errors="replace"))), "")
    return ("broken", f"the list calls it equivalent: {by}") if mutant.equivalent else ("killed", by)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "rooms", nargs="*", metavar="ROOM", help="a room of the list, ROOM:NUMBER, or the path of its code; all if none"
    )
    parser.add_argument("--list", type=Path, default=LIST, help="another list")
    parser.add_argument("--dry", action="store_true", help="only look whether every text is in its file once")
    chosen = parser.parse_args()
    wanted = [m for m in mutants(chosen.list) if not chosen.rooms or m.names & {*chosen.rooms}]
    if not wanted:
        parser.error("no such room or path in the list")
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",  # two mutants of one second and one size would share a .pyc
    }
    FORKS.set_forkserver_preload(list(LOADED))
    tally: dict[str, Counter[str]] = {m.room: Counter() for m in wanted}
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy = TreeCopy(Path(folder))
        if chosen.dry:
            reasons = [(mutant, lost(copy, mutant)) for mutant in wanted]
            for mutant, reason in reasons:
                if reason:
                    print(f"broken      {mutant} ({reason})")
            return 1 if any(reason for _, reason in reasons) else 0
        unharmed: dict[tuple[str, ...], int] = {}
        for mutant in wanted:
            began = time.monotonic()
            verdict, words = judge(copy, mutant, unharmed)
            tally[mutant.room][verdict] += 1
            reason = f" ({words})" if words else ""
            print(f"{verdict:<11} {time.monotonic() - began:4.0f} s  {mutant}{reason}", flush=True)
    print()
    for room, verdicts in tally.items():
        print(f"{room:<12} {verdicts.total():3d} mutants:", ", ".join(f"{n} {v}" for v, n in verdicts.most_common()))
    whole = sum(tally.values(), Counter[str]())
    print(f"{'all':<12} {whole.total():3d} mutants:", ", ".join(f"{n} {v}" for v, n in whole.most_common()))
    return 1 if whole["survived"] or whole["broken"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
