"""What figures were made with (commit, versions, models, seed), so that anyone can make them again."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ragkv
from ragkv.evaluation.environment import Environment

__all__ = ["COMMAND", "Model", "Origin", "commit_of"]

COMMAND = "python -m ragkv.benchmarks.papers"
"""The command that fills a table, without the table's name and options."""

_SHORT = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A checkpoint that answered. `fingerprint` is cut to 12 digits."""

    name: str
    dtype: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Everything that a table depends on besides its definition. `models` are by role; "" is the table's own."""

    command: str
    commit: str
    seed: int
    limit: int | None
    models: Mapping[str, Model]
    embedder: str | None
    reranker: str | None
    versions: Mapping[str, str]
    device: str

    @classmethod
    def of(
        cls,
        command: str,
        *,
        seed: int,
        limit: int | None,
        models: Mapping[str, Model],
        embedder: str | None,
        reranker: str | None,
    ) -> Origin:
        here = Environment.look()
        return cls(
            command=command,
            commit=commit_of(Path(ragkv.__file__).parent),
            seed=seed,
            limit=limit,
            models=models,
            embedder=embedder,
            reranker=reranker,
            versions=here.versions,
            device=here.devices[0],
        )


def commit_of(folder: Path) -> str:
    """The commit of the checkout that holds `folder`, with "+ changes" if its files differ; "unknown" without git.

    Changes in docs/ do not count, because the commands themselves write there.
    """
    commit = _git(folder, "rev-parse", f"--short={_SHORT}", "HEAD")
    if not commit or _git(folder, "check-ignore", str(folder)):  # installed inside the checkout of another project
        return "unknown"
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude,top)docs")
    return f"{commit} + changes" if changed else commit


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    except OSError:  # no git on this machine
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
