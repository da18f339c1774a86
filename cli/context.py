"""`ragkv query --context`: the files that questions are asked about without an index, and the model that reads them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ragkv.cli.console import note
from ragkv.cli.ingest import MINI_NOTE
from ragkv.cli.setting import VARIABLES, UserFile, user_file
from ragkv.cli.skipped import tell_skipped
from ragkv.config import IndexConfig, IngestConfig, RuntimeConfig
from ragkv.errors import IngestError, UsageError

if TYPE_CHECKING:
    from ragkv.index.contexts import Contexts
    from ragkv.model.language import LanguageModel

__all__ = ["context_material", "open_contexts", "refuse_options"]

_FOR_INDEX = ("index", "top_k", "retrieval", "rerank", "candidates", "where")
"""Options that say where and how to search."""


def refuse_options(ctx: typer.Context) -> None:
    """UsageError for an option that is of no use beside `--context`; variables and the user file are left aside."""
    for name in _FOR_INDEX:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flag = "--" + name.replace("_", "-")
            raise UsageError(
                f"{flag} is for searching an index, and --context answers from whole files; use one of them."
            )


def open_contexts(
    paths: Sequence[Path],
    model: str | None,
    device: str | None,
    limits: RuntimeConfig,
    *,
    tuning: Mapping[str, Mapping[str, int]],
    quiet: bool,
) -> Contexts:
    """Read the files, in the order given, and load the model that reads them.

    Settings come from variables and the user file, as for a new index; `ippd` answers unless `--engine` says
    otherwise; `tuning` adds to that of its engines. Raises UsageError for a missing file, and IngestError for a file
    that cannot be read.
    """
    from ragkv.index.contexts import Contexts

    return Contexts(*context_material(paths, model, device, tuning=tuning, quiet=quiet), limits=limits)


def context_material(
    paths: Sequence[Path],
    model: str | None,
    device: str | None,
    *,
    tuning: Mapping[str, Mapping[str, int]],
    quiet: bool,
) -> tuple[LanguageModel, list[tuple[str, str]], IndexConfig]:
    """What `Contexts` are made of: the model, the texts by name, and the configuration."""
    from ragkv.index.creation import new_config
    from ragkv.model.language import LanguageModel

    user = UserFile.read(user_file())
    texts = _texts(paths, user.settings.get("ingest", IngestConfig()), quiet=quiet)
    chosen: dict[str, Any] = {name: value for name in ("model", "dtype") if (value := os.environ.get(VARIABLES[name]))}
    chosen = {**user.settings, **chosen, **({} if model is None else {"model": model})}
    chosen["default_engine"] = "ippd"  # all questions read one prefilled context
    if tuning:
        chosen["tuning"] = {**chosen.get("tuning", {}), **tuning}
    config = new_config(chosen)
    if "model" not in chosen and not quiet:
        note(MINI_NOTE)
    return LanguageModel.load(config.model, dtype=config.dtype, device=device), texts, config


def _texts(paths: Sequence[Path], settings: IngestConfig, *, quiet: bool) -> list[tuple[str, str]]:
    """(name, text) of each file, read as an ingest reads it: by a process of its own, within the limits."""
    from ragkv.ingest import Limits, Skipped
    from ragkv.ingest.isolated import SourceReader
    from ragkv.ingest.source import find_sources

    sources, skipped = find_sources(paths)
    if named := [each for each in skipped if any(each.path == path.absolute() or each.path == path for path in paths)]:
        raise IngestError(f"Cannot read {named[0].path}: {named[0].reason}.")
    found, left_out = [], []
    with SourceReader(Limits.of(settings)) as reader:
        for source in sources:
            read = reader.read(source)
            found.append((source.name, read.text))
            left_out += [Skipped(path=source.path, reason=reason) for reason in read.left_out]
    if not found:
        raise IngestError(f"No file of {', '.join(map(str, paths))} can be read; give text, Markdown, HTML or PDF.")
    if not quiet:
        tell_skipped(skipped, left_out)
    return found
