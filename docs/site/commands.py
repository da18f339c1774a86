"""Writes docs/cli.md, the page of every command, from the typer application: `make cli-docs`."""

from __future__ import annotations

from pathlib import Path

import typer.main
from typer.cli import get_docs_for_click

from ragkv.cli.main import app

PAGE = Path(__file__).parent.parent / "cli.md"
HEAD = "<!-- Made by `make cli-docs` from the commands themselves; tests/test_docs.py compares. -->\n\n"


def commands() -> str:
    """The page as the commands are now."""
    command = typer.main.get_command(app)
    with typer.Context(command, info_name="ragkv") as context:
        text = get_docs_for_click(obj=command, ctx=context, name="ragkv", title="Commands")
    return HEAD + "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(commands(), encoding="utf-8")
