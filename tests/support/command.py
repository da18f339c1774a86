"""What a command left behind: exit code and both streams."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The last line on stderr: the error."""
        return self.err.strip().splitlines()[-1] if self.err.strip() else ""
