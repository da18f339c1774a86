"""`ragkv stats`: what an index holds, and how large it is."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragkv.cli.console import count, draw, print_json, say, share, size
from ragkv.cli.grid import facts, plain
from ragkv.cli.option import DEFAULT_INDEX, Index, Json, Quiet, Where
from ragkv.cli.program import brief
from ragkv.errors import UsageError

if TYPE_CHECKING:
    from ragkv.store import DocumentStats

__all__ = ["stats"]


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
    from ragkv.evaluation.record import kept_quality, outdated, unread_quality
    from ragkv.pipeline import RagKV

    if where and not per_document:
        raise UsageError("--where selects documents; add --per-document, or use ragkv ls.")
    with RagKV.open(index, readonly=True) as rag:
        found, config, kept = rag.stats(), rag.config, rag.store.ledger()
        budget = rag.store.budget if config.budget is None else config.budget
        quality = [{**report, "outdated": outdated(rag.store, report)} for report in kept_quality(rag.store)]
        unread = unread_quality(rag.store)
        listed = rag.list_documents(where=where or ()).documents if per_document else ()
        documents = [one.stats for one in listed]
    made_with = {name: getattr(config, name) for name in ("model", "codec", "embedder", "reranker", "retrieval")}
    policy = {
        "kv": config.kv,
        "kv_budget_bytes": budget,
        "kv_budget_used": None if budget is None else round(found.kv_bytes / max(budget, 1), 4),
        "kv_hits": kept.hits,
        "kv_misses": kept.misses,
        "kv_hit_rate": None if kept.hit_rate is None else round(kept.hit_rate, 4),
        "kv_evictions": kept.evictions,
        "kv_refused": kept.refused,
        "saved_seconds": round(kept.saved_seconds, 3),
    }
    values = {"index": str(index), **made_with, **asdict(found), **policy}
    if as_json:
        # not under `documents`, which is their number
        more = {"per_document": [one.to_json() for one in documents]} if per_document else {}
        print_json({**values, "quality": quality, **more})
        return
    if quiet and per_document:
        _show(documents)
        return
    table = facts()
    for key, value in values.items():
        if value is not None:
            table.add_row(key.replace("_", " "), _shown(key, value))
    for report in quality:
        for row in report["engines"]:
            table.add_row(f"quality of {row['engine']}", _quality(row, report))
    if unread:
        table.add_row("quality", "kept in a form that this version does not read: run ragkv doctor again")
    elif not quality:
        table.add_row("quality", "not measured: ragkv doctor")
    draw(table)
    if per_document:
        _show(documents)


def _shown(key: str, value: Any) -> str:
    """A figure as people read it: bytes with their unit, shares in per cent."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(key, one)}" for name, one in value.items()) or "-"
    if key in ("kv_budget_used", "kv_hit_rate"):
        return share(value)
    if not isinstance(value, int):
        return str(value)
    return size(value) if "bytes" in key else f"{value:,}"


def _quality(row: dict[str, Any], report: dict[str, Any]) -> str:
    """An engine's verdict with its figures, date and model, and the reason if it may no longer hold."""
    ci95 = row["ci95"] or {}
    shown = f"{row['verdict']} (top-1 {share(row['top1'], ci95.get('top1'))}, "
    shown += f"answers {share(row['answers'], ci95.get('answers'))}"
    if row["accuracy"] is not None and report["full_accuracy"] is not None:
        shown += f", right {row['accuracy']:.1%} of {report['gold']}, full {report['full_accuracy']:.1%}"
        if loss := ci95.get("loss"):
            shown += f", lost {100 * loss[0]:+.1f} to {100 * loss[1]:+.1f} points"
    shown += f"; {count(report['questions'], 'question')}, {report['date'][:10]}, {report['model']})"
    if row["ci95"] is None:
        shown += ": judged without an interval by an earlier version; run ragkv doctor again"
    return shown if report["outdated"] is None else f"{shown}: {report['outdated']}; run ragkv doctor again"


def _show(documents: list[DocumentStats]) -> None:
    """A row per document. KV is shown twice: all that the document needs, and what deleting it would free."""
    table = plain()
    table.add_column("document", overflow="fold")
    for name in ("chunks", "tokens", "KV records", "KV", "KV of its own", "ingested"):
        table.add_column(name, no_wrap=True)
    for one in documents:
        table.add_row(
            one.source,
            f"{one.chunks:,}",
            f"{one.tokens:,}",
            f"{one.kv_records:,}",
            size(one.kv_bytes),
            size(one.kv_bytes_own),
            time.strftime("%Y-%m-%d", time.localtime(one.ingested_at)),
        )
    say()
    draw(table)
