"""`ragkv doctor`: is this index well, and which engine and codec may answer from it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ragkv.cli.console import count, note, print_json, size
from ragkv.cli.option import DEFAULT_INDEX, Device, Index, Json, Quiet
from ragkv.cli.progress import steps
from ragkv.errors import RetrievalError, StoreError, UsageError
from ragkv.pipeline import RagKV

if TYPE_CHECKING:
    from ragkv.evaluation.doctor import Quality
    from ragkv.evaluation.environment import Environment, Patient
    from ragkv.store import StoreStats

__all__ = ["doctor"]

_STYLE = {"good": "green", "fair": "yellow", "poor": "red"}


def doctor(
    index: Index = DEFAULT_INDEX,
    model: Annotated[
        str | None,
        typer.Option(help="Judge this model on the index's documents; nothing is stored.", show_default="the index's"),
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(
            help='JSONL file: {"question": …, "answers": […]}, answers optional.',
            show_default="made from the index's chunks",
        ),
    ] = None,
    engines: Annotated[str | None, typer.Option(help="Engines to judge.", show_default="the index's")] = None,
    codecs: Annotated[str | None, typer.Option(help="Codecs to judge; `none` for none.", show_default="all")] = None,
    limit: Annotated[int, typer.Option(help="Ask at most so many questions.", min=1)] = 32,
    top_k: Annotated[int | None, typer.Option(help="Chunks per question.", min=1, show_default="the index's")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = 64,
    seed: Annotated[int, typer.Option(help="Draws the questions.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="8 questions, 16 tokens, the index's codec: a first impression.")
    ] = False,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show what ragkv runs on, then compare every engine and codec with full attention on your own documents.

    Next-token KL, first choices, answers, and accuracy where gold answers are known; a verdict for each, kept in the
    index and shown by `ragkv stats`. A poor verdict is no failure.

    Example: `ragkv doctor --questions questions.jsonl`
    """
    from ragkv.evaluation.doctor import Doctor
    from ragkv.evaluation.environment import Environment, Patient, remedies
    from ragkv.evaluation.question import made_questions, read_questions, sample
    from ragkv.evaluation.record import keep_quality
    from ragkv.evaluation.subject import Subject
    from ragkv.store import codec_names

    if quick:
        limit, max_new_tokens = min(limit, 8), min(max_new_tokens, 16)
    found = None if questions is None else read_questions(questions)
    with RagKV.open(index, device=device) as rag:
        environment, stats = Environment.look(), rag.stats()
        if not as_json:
            _show_environment(environment, index, stats)
        if not stats.chunks:
            raise RetrievalError(f"The index at {index} holds no chunk; run ragkv ingest PATH --index {index} first.")
        chosen = [rag.config.codec] if quick else codec_names()
        if codecs is not None:
            chosen = [] if codecs.strip() == "none" else _names("--codecs", codecs)
        subject = Subject.of(rag, model, device=device)
        examination = Doctor(
            rag,
            subject,
            engines=None if engines is None else _names("--engines", engines),
            codecs=chosen,
            top_k=top_k,
            max_new_tokens=max_new_tokens,
        )
        patient, todo = Patient.of(subject), remedies(stats, subject)
        if not as_json:
            _show_patient(patient, todo)
        asked = made_questions(rag.store, limit, seed) if found is None else sample(found, limit, seed)
        source = "made from the index's own chunks" if questions is None else str(questions)
        with steps("doctor", silent=quiet or as_json) as on_progress:
            quality = examination.examine(asked, source=source, seed=seed, on_progress=on_progress)
        kept = True
        try:
            keep_quality(rag.store, quality.to_json())
        except StoreError as error:
            kept = False
            note(f"The verdicts are not kept in the index: {error}")
    if as_json:
        print_json(
            {
                "environment": asdict(environment),
                "index": {"folder": str(index), **asdict(stats)},
                "model": asdict(patient),
                "todo": todo,
                "quality": quality.to_json(),
                "kept": kept,
            }
        )
        return
    _show_quality(quality)


def _names(option: str, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UsageError(f"{option} names nothing; write a list such as ape,block.")
    return names


def _grid() -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(width=12, style="dim")
    table.add_column(overflow="fold")
    return table


def _print(value: Any) -> None:
    Console(highlight=False).print(value)


def _show_environment(environment: Environment, index: Path, stats: StoreStats) -> None:
    table = _grid()
    table.add_row("versions", ", ".join(f"{name} {version}" for name, version in environment.versions.items()))
    table.add_row("devices", "; ".join(environment.devices))
    table.add_row(
        "index",
        f"{index}: {count(stats.documents, 'document')}, {count(stats.chunks, 'chunk')}, "
        f"{count(stats.tokens, 'token')}; {count(stats.kv_records, 'KV record')}, {size(stats.kv_bytes)}",
    )
    _print(table)


def _show_patient(patient: Patient, todo: list[str]) -> None:
    table = _grid()
    table.add_row(
        "model",
        f"{patient.model}: {patient.parameters / 1e6:,.1f}M parameters, {patient.dtype}, {patient.device}, "
        f"fingerprint {patient.fingerprint[:12]}, "
        + ("the one that made the index" if patient.same else "not the one that made the index"),
    )
    for number, sentence in enumerate(todo or ["nothing"]):
        table.add_row("" if number else "to do", sentence)
    _print(table)


def _show_quality(quality: Quality) -> None:
    print(
        f"\n{count(quality.questions, 'question')} ({quality.source}), {count(quality.tokens, 'token')} of answers by "
        f"full attention, top {quality.top_k}, seed {quality.seed}"
        + (f"; {quality.skipped} found no chunk" if quality.skipped else "")
    )
    table = Table("engine", "verdict", "KL", "top-1", "answers", box=None, pad_edge=False)
    if quality.gold:
        table.add_column("right")
        table.add_row("full", "", "", "", "", _share(quality.full_accuracy))
    for row in quality.engines:
        right = [_share(row.accuracy)] if quality.gold else []
        table.add_row(row.engine, _word(row.verdict), f"{row.kl:.3f}", _share(row.top1), _share(row.answers), *right)
    _print(table)
    for row in quality.engines:
        print(f"{row.engine}: {row.advice}")
    if quality.questions < 20:
        note(f"With so few questions one answer is {1 / quality.questions:.0%}: ask more before you rely on it.")
    if quality.codecs:
        print()
        table = Table("codec", "engine", "verdict", "size", "KL", "top-1", "answers", box=None, pad_edge=False)
        for coded in quality.codecs:
            figures = (
                ("bit-exact", "", "")
                if coded.exact
                else (
                    f"{coded.kl:.4f}",
                    _share(coded.top1),
                    _share(coded.answers),
                )
            )
            table.add_row(coded.codec, coded.engine, _word(coded.verdict), _share(coded.size), *figures)
        _print(table)
        for name, advice in {row.codec: row.advice for row in quality.codecs if not row.exact}.items():
            print(f"{name}: {advice}")


def _word(verdict: str) -> str:
    return f"[{_STYLE[verdict]}]{verdict}[/]"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
