"""Run a program's main function in this process: exit code and both streams."""

import io
import logging
import sys
from dataclasses import dataclass

__all__ = ["Result", "Terminal", "typed"]


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def sentence(self):
        """The last line on stderr, which is the error."""
        return self.err.strip().splitlines()[-1] if self.err.strip() else ""


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    encoding = "utf-8"

    def isatty(self):
        return True


def typed(main, capsys, monkeypatch):
    """`main` as a function of the words after the program's name."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["ragkv", *map(str, arguments)])
        capsys.readouterr()
        handlers, level = logging.root.handlers[:], logging.root.level
        try:
            main()
            code = 0
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        finally:
            logging.root.handlers[:] = handlers
            logging.root.setLevel(level)
        found = capsys.readouterr()
        return Result(code, found.out, found.err)

    return run
