"""The commands that look after an index, from `ls`, `show` and `delete` to `backup`, `pack` and `warm`."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ragkv.cli.console import (
    confirm,
    count,
    draw,
    echo,
    echo_text,
    facts,
    note,
    plain,
    print_facts,
    print_json,
    progress_bar,
    share,
    size,
    steps,
)
from ragkv.cli.main import brief
from ragkv.cli.options import (
    DEFAULT_INDEX,
    Device,
    Documents,
    DryRun,
    Engine,
    Index,
    Json,
    NoWait,
    Quiet,
    Retrieval,
    Threads,
    TopK,
    Where,
    given_values,
    wait,
)
from ragkv.cli.question_files import questions_of_log
from ragkv.errors import UsageError
from ragkv.index.quality import kept_quality, outdated, unread_quality
from ragkv.types import Chunk
from ragkv.util.display import beginning

if TYPE_CHECKING:
    from ragkv.index.maintenance import WarmReport
    from ragkv.index.pack import Pack
    from ragkv.index.search import ChunkView
    from ragkv.store import DocumentStats, KVRecord, Problem, Repair, Verification

TERMINAL_ROWS = 50


def stats(
    index: Index = DEFAULT_INDEX,
    per_document: Annotated[bool, typer.Option("--per-document", help="Also show a row for each document.")] = False,
    where: Where = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show how many documents, chunks and KV records an index holds, its sizes, and the verdicts of ragkv doctor.

    Example: `ragkv stats --index my-index --per-document`
    """
    brief()
    from ragkv.pipeline import RagKV
    from ragkv.store.tier import shown

    if where and not per_document:
        raise UsageError("--where selects documents; add --per-document, or use ragkv ls.")
    with RagKV.open(index, readonly=True) as rag:
        totals, config, uses = rag.store.stats(), rag.config, rag.store.ledger()
        budget = rag.store.budget if config.budget is None else config.budget
        quality = [{**report, "outdated": outdated(rag.store, report)} for report in kept_quality(rag.store)]
        unread = unread_quality(rag.store)
        tiers = [{"url": shown(tier.url)} for tier in config.tiers]
        listed = rag.list_documents(where=where or ()).documents if per_document else ()
        documents = [document.stats for document in listed]
    made_with = {name: getattr(config, name) for name in ("model", "codec", "embedder", "reranker", "retrieval")}
    window = config.encoding.context
    policy = {
        "context_tokens": window or None,
        "context_cost": round(1 + window * totals.chunks / totals.tokens, 1) if window and totals.tokens else None,
        "kv": config.kv,
        "kv_budget_bytes": budget,
        "kv_budget_used": None if budget is None else round(totals.kv_bytes / max(budget, 1), 4),
        "kv_hits": uses.hits,
        "kv_misses": uses.misses,
        "kv_hit_rate": None if uses.hit_rate is None else round(uses.hit_rate, 4),
        "kv_evictions": uses.evictions,
        "kv_refused": uses.refused,
        "saved_seconds": round(uses.saved_seconds, 3),
    }
    values = {"index": str(index), **made_with, **asdict(totals), **policy}
    if as_json:
        # not under `documents`, which is their number
        more = {"per_document": [document.to_json() for document in documents]} if per_document else {}
        print_json({**values, "tiers": tiers, "quality": quality, **more})
        return
    if quiet and per_document:
        _show(documents)
        return
    table = facts()
    for key, value in values.items():
        if value is not None:
            table.add_row(key.replace("_", " "), _shown(key, value))
    for tier in tiers:
        table.add_row("tier", tier["url"])
    for report in quality:
        for row in report["engines"]:
            table.add_row(f"quality of {row.get('label', row['engine'])}", _quality(row, report))
    if unread:
        table.add_row("quality", "damaged: run ragkv doctor again")
    elif not quality:
        table.add_row("quality", "not measured: ragkv doctor")
    draw(table)
    if per_document:
        _show(documents)


def _shown(key: str, value: Any) -> str:
    """A figure in readable form: bytes with their unit, shares in per cent."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(key, part)}" for name, part in value.items()) or "-"
    if key in ("kv_budget_used", "kv_hit_rate"):
        return share(value)
    if key == "context_cost":
        return f"at most {value} times the tokens to encode"
    if not isinstance(value, int):
        return str(value)
    return size(value) if "bytes" in key else f"{value:,}"


def _quality(row: dict[str, Any], report: dict[str, Any]) -> str:
    """An engine's verdict with its figures, date and model, and the reason if it may no longer hold."""
    ci95 = row["ci95"]
    shown = f"{row['verdict']} (top-1 {share(row['top1'], ci95['top1'])}, "
    shown += f"answers {share(row['answers'], ci95['answers'])}"
    if row["accuracy"] is not None and report["full_accuracy"] is not None:
        shown += f", right {row['accuracy']:.1%} of {report['gold']}, full {report['full_accuracy']:.1%}"
        if loss := ci95["loss"]:
            shown += f", lost {100 * loss[0]:+.1f} to {100 * loss[1]:+.1f} points"
    shown += f"; {count(report['questions'], 'question')}, {report['date'][:10]}, {report['model']})"
    return shown if report["outdated"] is None else f"{shown}: {report['outdated']}; run ragkv doctor again"


def _show(documents: list[DocumentStats]) -> None:
    """A row per document. KV is shown twice: all that the document needs, and what deleting it would free."""
    echo()
    _draw_documents(
        ("chunks", "tokens", "KV records", "KV", "KV of its own", "ingested"),
        (
            (
                row.source,
                *(f"{number:,}" for number in (row.chunks, row.tokens, row.kv_records)),
                size(row.kv_bytes),
                size(row.kv_bytes_own),
                time.strftime("%Y-%m-%d", time.localtime(row.ingested_at)),
            )
            for row in documents
        ),
        justify="left",
    )


def _draw_documents(
    columns: Iterable[str], rows: Iterable[tuple[str, ...]], *, justify: Literal["left", "right"]
) -> None:
    table = plain()
    table.add_column("document", overflow="fold")
    for name in columns:
        table.add_column(name, no_wrap=True, justify=justify)
    for row in rows:
        table.add_row(*row)
    draw(table)


SHOWN = 50


def verify(
    index: Index = DEFAULT_INDEX,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Skip the KV itself, which is most of the bytes; list what is skipped."),
    ] = False,
    tiers: Annotated[
        bool, typer.Option("--tiers", help="Also read the index's KV in its shared tiers (docs/tiers.md).")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check every row, checksum and reference of an index; other processes may use it meanwhile.

    The exit code is 1 if something is wrong; `ragkv repair` repairs it. Damaged values in a tier are never used; delete
    them there by the names that are shown.

    Example: `ragkv verify --index my-index --quick`
    """
    from ragkv.pipeline import RagKV

    with RagKV.open(index, readonly=True) as rag, progress_bar(quiet or as_json) as on_progress:
        verification = rag.maintenance.verify(quick=quick, on_progress=on_progress)
        shared = rag.maintenance.verify_tiers() if tiers else []
    damaged = [f"damaged: {name} in the tier {tier['url']}" for tier in shared for name in tier["damaged"]]
    if as_json:
        print_json({**verification.to_json(), **({"tiers": shared} if tiers else {})})
    else:
        show_findings(verification.findings)
        for line in damaged:
            echo(line)
        if not quiet:
            _show_verification(verification, str(index))
            for tier in shared:
                counted = (
                    f"{tier['present']:,} values whole, {len(tier['damaged']):,} damaged, {tier['absent']:,} absent"
                )
                note(f"{tier['url']}: {counted}{'; ' + tier['error'] if tier['error'] else ''}")
    if not verification.ok or damaged:
        raise typer.Exit(1)


def show_findings(findings: tuple[Problem, ...]) -> None:
    """Print a line for each finding, up to a readable number."""
    for problem in findings[:SHOWN]:
        echo(f"{problem.kind}: {problem}")
    if len(findings) > SHOWN:
        echo(f"... and {count(len(findings) - SHOWN, 'finding')} more; --json lists all")


def _show_verification(verification: Verification, index: str) -> None:
    checked = verification.checked
    what = f"{count(checked['documents'], 'document')}, {count(checked['chunks'], 'chunk')}, "
    what += f"{count(checked['kv'], 'KV record')}, {size(checked['bytes'])} read"
    echo(f"{index}: {'no damage' if verification.ok else count(len(verification.findings), 'finding')} ({what}).")
    for left_out in verification.unchecked:
        note(f"not checked: {left_out}")
    orphans = verification.orphans
    if orphans.records or orphans.segments:
        note(
            f"{count(orphans.records, 'orphan record')} and {count(orphans.segments, 'orphan segment')} "
            f"({size(orphans.bytes)}): not damage; an ingest is running or was stopped, and ragkv gc deletes them"
        )
    for name, state in verification.derived.items():
        if state != "current":
            note(f"{name}: {state}")


def repair(
    index: Index = DEFAULT_INDEX,
    dry_run: DryRun = False,
    no_encode: Annotated[
        bool, typer.Option("--no-encode", help="Only drop damaged KV; it is encoded when a question needs it.")
    ] = False,
    device: Device = None,
    threads: Threads = None,
    no_wait: NoWait = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Drop damaged parts of an index and make them again: KV from the chunks' tokens, vectors from their text.

    A document whose text or chunks are damaged is dropped and named: ingest its file again. The exit code is then 1, as
    it is if damage remains.

    Example: `ragkv repair --index my-index`
    """
    from ragkv.pipeline import RagKV

    with (
        RagKV.open(index, device=device, readonly=dry_run) as rag,
        progress_bar(quiet or as_json) as on_progress,
    ):
        report = rag.maintenance.repair(encode=not no_encode, dry_run=dry_run, on_progress=on_progress, **wait(no_wait))
    if as_json:
        print_json(report.to_json())
    elif report.dropped or report.left or not quiet:
        _show_repair(report, str(index))
    if not report.ok:
        raise typer.Exit(1)


def _show_repair(report: Repair, index: str) -> None:
    if report.dry_run:
        show_findings(report.problems)
    for name, reason in report.dropped.items():
        echo(f"{'would be ' if report.dry_run else ''}dropped: {name} ({reason}); ingest it again")
    show_findings(report.left)
    if report.points:
        echo(f"{index}: {count(report.points, 'point')} sent to Qdrant, or deleted there.")
    if not report.problems:
        echo(f"{index}: no damage, nothing to repair.")
        return
    parts = [
        (report.encoded, "KV record", "encoded anew"),
        (report.dropped_records, "KV record", "dropped"),
        (len(report.mended), "document", "repaired"),
        (len(report.dropped), "document", "dropped"),
        (report.rows, "row", "put right"),
        (len(report.facts), "fact", "forgotten"),
    ]
    done = ", ".join(f"{count(number, noun)} {verb}" for number, noun, verb in parts if number)
    echo(f"{index}: {count(len(report.problems), 'finding')}; {'would be: ' if report.dry_run else ''}{done}.")


def gc(
    index: Index = DEFAULT_INDEX,
    dry_run: DryRun = False,
    no_wait: NoWait = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Delete KV that no chunk needs, the KV of old prompts, and outdated retrieval indexes.

    The command waits for a running ingest, because its records belong to no document until that document is complete.
    The file keeps its size and the space is used again; `ragkv compact` makes a smaller file.

    Example: `ragkv gc --index my-index --dry-run`
    """
    from ragkv.pipeline import RagKV

    with RagKV.open(index, readonly=dry_run) as rag, progress_bar(quiet or as_json) as on_progress:
        collection = rag.maintenance.gc(dry_run=dry_run, on_progress=on_progress, **wait(no_wait))
    if as_json:
        print_json(collection.to_json())
    elif not quiet:
        echo(
            f"{index}: {'Would drop' if dry_run else 'Dropped'} {count(collection.records, 'orphan record')}, "
            f"{count(collection.segments, 'orphan segment')} and "
            f"{count(collection.index_records, 'record')} of old prompts ({size(collection.bytes)}), "
            f"{count(collection.derived, 'stale derived folder')} ({size(collection.derived_bytes)})"
            + (f", {count(collection.tiers, 'value')} in shared tiers." if collection.tiers else ".")
        )


Verify = Annotated[bool, typer.Option("--verify", help="Check the copy before it is kept, as ragkv verify does.")]


def backup(
    destination: Annotated[Path, typer.Argument(help="A new or empty folder for the copy.", metavar="DEST")],
    index: Index = DEFAULT_INDEX,
    verify: Verify = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Copy an index as it is at one moment, while other processes read and write it.

    The copy is an index like any other. It appears under its name once it is complete on the disk, or not at all.

    Example: `ragkv backup /backups/my-index-monday --index my-index --verify`
    """
    from ragkv.pipeline import RagKV

    with RagKV.open(index, readonly=True) as rag, progress_bar(quiet or as_json) as on_progress:
        copy = rag.maintenance.backup(destination, verify=verify, on_progress=on_progress)
    if as_json:
        print_json(copy.to_json())
    elif not quiet:
        echo(f"{destination}: {size(copy.bytes_after)}{', verified' if copy.verified else ''}.")


def compact(
    output: Annotated[Path, typer.Option(help="A new or empty folder for the compacted index.")],
    index: Index = DEFAULT_INDEX,
    verify: Verify = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Copy an index without its free pages: the copy is smaller and holds no bytes of deleted documents.

    The old index does not change and may be used meanwhile; later writes to it are not in the copy.
    When no process uses the old index any more, put the new folder in its place.

    Example: `ragkv compact --index my-index --output my-index-compacted`
    """
    from ragkv.pipeline import RagKV

    with RagKV.open(index, readonly=True) as rag, progress_bar(quiet or as_json) as on_progress:
        copy = rag.maintenance.compact(output, verify=verify, on_progress=on_progress)
    if as_json:
        print_json(copy.to_json())
    elif not quiet:
        checked = ", verified" if copy.verified else ""
        echo(f"{output}: {size(copy.bytes_before)} before, {size(copy.bytes_after)} now{checked}.")


def pack(
    destination: Annotated[Path, typer.Argument(help="The new file.", metavar="FILE")],
    names: Documents = None,
    index: Index = DEFAULT_INDEX,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write an index, or with DOCUMENT only these and their KV, into one file, for ragkv unpack on another machine.

    It holds no tiers, no deleted text and no KV of other documents.

    Example: `ragkv pack manuals.ragkv 'manuals/*' --index my-index`
    """
    from ragkv.pipeline import RagKV

    if str(destination) == "-":
        raise UsageError("A pack is written to a file, not to stdout; name one, as in my-index.ragkv.")
    with RagKV.open(index, readonly=True) as rag, progress_bar(quiet or as_json) as on_progress:
        contents = rag.pack(destination, names=names or (), on_progress=on_progress)
    _show_pack(contents, destination, as_json=as_json, quiet=quiet)


def unpack(
    file: Annotated[str, typer.Argument(help="A file that ragkv pack wrote, or its URL (s3://…).", metavar="FILE")],
    index: Annotated[Path, typer.Option(help="A new or empty folder for the index.", metavar="FOLDER")],
    documents_only: Annotated[
        bool, typer.Option("--documents-only", help="Take the documents and encode them again, for any model.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Where the model is; with --documents-only any.", show_default="the pack's")
    ] = None,
    device: Device = None,
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make an index from a pack: its questions are answered from the KV in it, and nothing is encoded.

    A damaged file, and a model or embedder with other weights than the pack's, are refused. Unpack only what you trust:
    KV can be computed from any other text. minisign or gpg tell who made a file.

    Example: `ragkv unpack manuals.ragkv --index my-manuals`
    """
    from ragkv.index.pack import unpack as unpacked

    contents = unpacked(file, index, documents_only=documents_only, model=model, device=device)
    _show_pack(contents, index, as_json=as_json, quiet=quiet)


def _show_pack(contents: Pack, path: Path, *, as_json: bool, quiet: bool) -> None:
    if as_json:
        print_json(contents.to_json())
    elif not quiet:
        what = f"{count(contents.documents, 'document')}, {count(contents.chunks, 'chunk')}"
        made = f"{contents.encoded:,} encoded" if contents.encoded else count(contents.kv_records, "KV record")
        echo(f"{path}: {what}, {made}, {size(contents.bytes)}.")


def warm(
    *,
    names: Documents = None,
    index: Index = DEFAULT_INDEX,
    questions: Annotated[
        Path | None,
        typer.Option(help="A JSONL file of questions, as for `ragkv query`: what they would read.", metavar="FILE"),
    ] = None,
    most: Annotated[
        int | None, typer.Option(help="This many chunks: those that questions have read most.", min=1)
    ] = None,
    where: Where = None,
    engine: Engine = None,
    top_k: TopK = None,
    retrieval: Retrieval = None,
    device: Device = None,
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Encode the KV that questions will read, within the index's kv_budget.

    KV that exists is skipped, so the same command continues a stopped run. Over the budget, the KV with the lowest
    score is evicted first, and KV whose score is lower than all others is not encoded. --engine, --top-k and
    --retrieval are those of the questions; documents are encoded for the engines of the index.

    Example: `ragkv warm --questions log.jsonl --index my-index`

    Example: `ragkv warm 'manuals/*' --index my-index`
    """
    from ragkv.pipeline import RagKV

    if sum((questions is not None, most is not None, bool(names or where))) != 1:
        raise UsageError("Say what to make KV for: documents (or --where), --questions FILE, or --most N; one of them.")
    with RagKV.open(index, readonly=False, device=device) as rag, steps("warm", silent=quiet or as_json) as show:
        if questions is not None:
            options = given_values(top_k=top_k, retrieval=retrieval)
            asked = questions_of_log(rag, questions, engine, options, quiet=quiet)
            none = "no question finds a chunk whose KV its engine reads"
            wanted = rag.maintenance.wanted(questions=asked, on_question=lambda done: show(done, len(asked), "search"))
        elif most is not None:
            none = "no question has read a chunk yet"
            wanted = rag.maintenance.wanted(most=most)
        else:
            none = "these documents have no text"
            wanted = rag.maintenance.wanted(documents=names or (), where=where or ())
        report = rag.maintenance.warm(
            wanted, on_progress=lambda done: show(done.present + done.encoded, done.wanted, "encode")
        )
    if as_json:
        print_json(report.to_json())
    elif not quiet:
        _show_warming(report, index, none)


def _show_warming(report: WarmReport, index: Path, none: str) -> None:
    if not report.wanted:
        echo(f"{index}: nothing to make: {none}.")
        return
    there, made = (f"{number:,} {'was' if number == 1 else 'were'}" for number in (report.present, report.encoded))
    echo(
        f"{index}: of {count(report.wanted, 'chunk KV')}, {there} there and {made} made"
        + (f" ({size(report.bytes)}, in {report.seconds:.1f} s)." if report.encoded else ".")
    )
    if report.refused:
        echo(f"{report.refused:,} found no room: the budget is full of KV that is worth more.")


def ls(
    pattern: Annotated[
        str | None,
        typer.Argument(
            help="Id, source name, path, or a pattern such as 'notes/*'.", metavar="PATTERN", show_default="all"
        ),
    ] = None,
    index: Index = DEFAULT_INDEX,
    where: Where = None,
    limit: Annotated[
        int | None,
        typer.Option(help="How many documents to list; 0 lists all.", min=0, show_default="50 on a terminal, else all"),
    ] = None,
    after: Annotated[
        str,
        typer.Option(help="List the documents behind this id, as the page before named it.", show_default=False),
    ] = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List documents with their chunks and sizes; with --quiet, only their ids.

    A large index is listed page by page: `--limit` documents behind the id `--after`. Without a pattern or
    conditions, a page costs the same at any size of the index.

    Example: `ragkv ls '*.pdf' --where title=Handbook* --index my-index`
    """
    brief()
    from ragkv.pipeline import RagKV

    if limit is None and sys.stdout.isatty() and not as_json:
        limit = TERMINAL_ROWS
    with RagKV.open(index, readonly=True) as rag:
        page = rag.list_documents([] if pattern is None else [pattern], where or [], after=after, limit=limit or None)
        documents, total = [document.to_json() for document in page.documents], rag.store.stats().documents
    if as_json:
        print_json({"documents": documents, "after": page.after, "total": total})
    elif quiet:
        for document in documents:
            echo(document["document"])
    elif documents:
        _draw_documents(
            ("chunks", "tokens", "KV", "text", "vectors"),
            (
                (
                    row["source"],
                    *(f"{row[name]:,}" for name in ("chunks", "tokens")),
                    *(size(row[name]) for name in ("kv_bytes", "text_bytes", "vector_bytes")),
                )
                for row in documents
            ),
            justify="right",
        )
        chunks = sum(document["chunks"] for document in documents)
        kv = sum(document["kv_bytes"] for document in documents)
        shown = f"{count(len(documents), 'document')}, {count(chunks, 'chunk')}, KV {size(kv)}"
        note(f"{shown} (KV that documents share is counted for each)")
    elif total:
        note(f"There are no more documents (of {total:,}).")
    else:
        note(f"{index} holds no document; add some with ragkv ingest PATH --index {index}.")
    if page.after is not None and not as_json:
        name = shlex.quote(page.after)
        note(f"There are more (the index holds {total:,}): --after {name} lists the next, --limit 0 all.")


def show(
    chunk: Annotated[
        str, typer.Argument(help="A chunk's id or its start, or DOCUMENT:NUMBER (from 0).", metavar="CHUNK")
    ],
    index: Index = DEFAULT_INDEX,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show a chunk: its text, place, KV records, vectors and neighbours. With --quiet, only its text.

    Example: `ragkv show notes.md:3 --index my-index`
    """
    from ragkv.index.search import chunk_named, look_at
    from ragkv.pipeline import RagKV

    with RagKV.open(index, readonly=True) as rag:
        view = look_at(rag.store, chunk_named(rag.store, chunk))
    if as_json:
        print_json(view.to_json())
        return
    if not quiet:
        _facts(view)
        echo()
    echo_text(view.chunk.text)


def _facts(view: ChunkView) -> None:
    chunk = view.chunk
    place = [f"chunk {chunk.ordinal}"]
    place += [] if chunk.page is None else [f"page {chunk.page}"]
    place += [] if chunk.heading is None else [f"under {chunk.heading!r}"]
    print_facts(
        [
            ("chunk", chunk.chunk_id),
            ("document", chunk.document_id),
            ("place", ", ".join(place)),
            ("characters", f"{chunk.start:,} to {chunk.end:,} of the document's text"),
            ("tokens", f"{len(chunk.token_ids):,}, the separator after it included"),
            *((f"KV, {record.encoding}", _record(record)) for record in view.kv),
            *([] if view.kv else [("KV", "none: the question that needs it encodes it")]),
            ("vectors", ", ".join(f"{kind} ({what})" for kind, what in view.vectors.items()) or "none"),
            ("before", _neighbour(view.before)),
            ("after", _neighbour(view.after)),
        ]
    )


def _record(record: KVRecord) -> str:
    saw = f"after a prefix of {count(record.prefix_tokens, 'token')}, " if record.prefix_tokens else ""
    shared = "" if record.shared_by == 1 else f", shared by {count(record.shared_by, 'chunk')}"
    return (
        f"{record.codec}, {size(record.bytes)} of {size(record.raw_bytes)}, {saw}{count(record.layers, 'layer')} of "
        f"{record.dtype}, in {count(record.segments, 'segment')}{shared}, model {record.model[:12]}"
    )


def _neighbour(chunk: Chunk | None) -> str:
    return "none" if chunk is None else f"{chunk.chunk_id}: {beginning(chunk.text, 48)}"


def delete(
    names: Documents = None,
    index: Index = DEFAULT_INDEX,
    where: Where = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
    dry_run: DryRun = False,
    no_wait: NoWait = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Delete documents with their text, chunks and vectors, and the KV that no other document needs.

    Questions no longer find them. Their bytes stay in free pages of the file until those are used again;
    `ragkv compact` writes a file without free pages.

    With both names and --where, the named documents that match are deleted.

    Example: `ragkv delete notes.pdf 'drafts/*' --index my-index`
    """
    from ragkv.index.search import select
    from ragkv.pipeline import RagKV

    if not names and not where:
        raise UsageError("Name the documents to delete, or choose them with --where FIELD=PATTERN.")
    with RagKV.open(index, readonly=dry_run) as rag:
        ids = [stored.document.document_id for stored in select(rag.store, names or (), where or ())]
        if not dry_run:
            if not yes and not sys.stdin.isatty():
                raise UsageError(f"Deleting {count(len(ids), 'document')} needs --yes when stdin is not a terminal.")
            if not yes:
                for document_id in ids:
                    note(document_id)
                confirm(f"Delete {count(len(ids), 'document')}?")
            ids = rag.delete(*ids, **wait(no_wait))
    if as_json:
        print_json({"deleted": ids, "dry_run": dry_run})
    elif not quiet:
        for document_id in ids:
            echo(f"{'would delete' if dry_run else 'deleted'} {document_id}")
