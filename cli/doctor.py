"""`ragkv doctor`: check the installation and the index, and compare engines and codecs with full attention."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ragkv.cli import completion
from ragkv.cli.console import between, count, draw, note, print_json, say, share, size
from ragkv.cli.grid import facts, plain
from ragkv.cli.option import DEFAULT_INDEX, Device, Index, Json, Quiet, given_names
from ragkv.cli.progress import progress_bar, steps
from ragkv.config import CONFIG_FILE
from ragkv.errors import RagkvError, RetrievalError, StoreError, UsageError

if TYPE_CHECKING:
    from ragkv.evaluation.doctor import Quality
    from ragkv.evaluation.environment import Environment, JudgedModel
    from ragkv.evaluation.presence import ModelState
    from ragkv.pipeline import RagKV
    from ragkv.store import StoreStats, Verification

__all__ = ["doctor"]

_NAMES = 12  # width of the names on the left, so that all tables of a run line up
_STYLE = {"good": "green", "fair": "yellow", "poor": "red", "not enough to tell": "dim"}


def doctor(
    index: Index = DEFAULT_INDEX,
    model: Annotated[
        str | None,
        typer.Option(help="Judge this model on the index's documents; no KV is stored.", show_default="the index's"),
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(
            help='JSONL file: {"question": …, "answers": […]}, answers optional.',
            show_default="made from the index's chunks",
        ),
    ] = None,
    engines: Annotated[
        str | None,
        typer.Option(help="Engines to judge.", show_default="the index's", autocompletion=completion.engine_lists),
    ] = None,
    codecs: Annotated[
        str | None,
        typer.Option(
            help="Codecs to judge; `none` for none.", show_default="all", autocompletion=completion.codec_lists
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option(help="Ask at most this many questions; the verdict `good` needs at least sixty.", min=1)
    ] = 100,
    top_k: Annotated[int | None, typer.Option(help="Chunks per question.", min=1, show_default="the index's")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=1)] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the draw of questions.")] = 0,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="8 questions, 16 tokens, only the index's codec: rarely enough for a verdict."),
    ] = False,
    health: Annotated[
        bool, typer.Option("--health", help="Only check the machine, the models and the index; compare nothing.")
    ] = False,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check the machine, the models and the index, say what to do, and compare engines with full attention.

    Every engine and codec is compared on your own documents: KL of next tokens, agreement of the most likely token,
    equal answers, and accuracy if gold answers are given, each with a 95 % interval. From these follows a verdict
    (good, fair, poor, or not enough to tell), which is kept in the index and shown by `ragkv stats`. A poor verdict is
    a result, so the exit code is 0. Without an index, or with --health, nothing is compared.

    Example: `ragkv doctor --questions questions.jsonl`
    """
    from ragkv.evaluation.environment import Environment
    from ragkv.evaluation.presence import models_present
    from ragkv.pipeline import RagKV

    asked_for = model is not None or questions is not None or engines is not None or codecs is not None or quick
    if health and asked_for:
        raise UsageError("--health compares nothing; leave out the options of the comparison, or --health.")
    judged = None if engines is None else given_names("--engines", engines)
    coded = None if codecs is None else [] if codecs.strip() == "none" else given_names("--codecs", codecs)
    environment = Environment.look()
    if not (index / CONFIG_FILE).exists() and index == DEFAULT_INDEX and not asked_for:
        found = _Found(environment, models_present(None), [f"There is no index here: ragkv ingest PATH makes {index}."])
        if as_json:
            print_json(found.to_json())
        else:
            found.show()
        return
    with RagKV.open(index, device=device) as rag:
        stats = rag.stats()
        found = _Found(environment, models_present(rag.config), [], index=index, stats=stats)
        if not as_json:
            found.show()
        with progress_bar(quiet or as_json) as on_progress:
            found.verified = rag.verify(quick=True, on_progress=on_progress)
        found.todo = _remedies(rag, found)
        if not as_json:
            found.show_health(todo=health)
        if health:
            if as_json:
                print_json(found.to_json())
            return
        if quick:
            limit, max_new_tokens = min(limit, 8), min(max_new_tokens, 16)
        chosen = _Comparison(
            model=model,
            questions=questions,
            engines=judged,
            codecs=[rag.config.codec] if quick and coded is None else coded,
            limit=limit,
            top_k=top_k,
            max_new_tokens=max_new_tokens,
            seed=seed,
            device=device,
        )
        _compare(rag, found, chosen, as_json=as_json, quiet=quiet)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """What is compared with full attention, and on which questions. None: as the index says, and all codecs."""

    model: str | None
    questions: Path | None
    engines: list[str] | None
    codecs: list[str] | None
    limit: int
    top_k: int | None
    max_new_tokens: int
    seed: int
    device: str | None


@dataclass(slots=True)
class _Found:
    """What is known without loading a model; each part is shown as soon as it is found."""

    environment: Environment
    models: tuple[ModelState, ...]
    todo: list[str]
    index: Path | None = None
    stats: StoreStats | None = None
    verified: Verification | None = None

    def show(self) -> None:
        table = facts(width=_NAMES)
        versions = ", ".join(f"{name} {version}" for name, version in self.environment.versions.items())
        table.add_row("versions", versions)
        table.add_row("devices", "; ".join(self.environment.devices))
        for number, one in enumerate(self.models):
            weighs = "" if one.bytes is None else f", {size(one.bytes)}"
            table.add_row("" if number else "models", f"{one.role} {one.name}: {one.state} ({one.what}{weighs})")
        if self.stats is not None:
            stats = self.stats
            table.add_row(
                "index",
                f"{self.index}: {count(stats.documents, 'document')}, {count(stats.chunks, 'chunk')}, "
                f"{count(stats.tokens, 'token')}; {count(stats.kv_records, 'KV record')}, {size(stats.kv_bytes)}",
            )
        else:
            _todo(table, self.todo)
        draw(table)

    def show_health(self, *, todo: bool) -> None:
        assert self.verified is not None
        table, found = facts(width=_NAMES), self.verified
        state = "no damage" if found.ok else count(len(found.findings), "finding")
        table.add_row("health", f"{state} (KV payloads not read: ragkv verify reads them)")
        for name, derived in found.derived.items():
            table.add_row("", f"{name} index: {derived}")
        if todo:
            _todo(table, self.todo)
        draw(table)

    def to_json(self) -> dict[str, Any]:
        held: dict[str, Any] | None = None
        if self.stats is not None and self.verified is not None:
            held = {"folder": str(self.index), **asdict(self.stats), "health": self.verified.to_json()}
        environment = {**asdict(self.environment), "models": [asdict(one) for one in self.models]}
        return {
            "environment": environment,
            "index": held,
            "model": None,
            "todo": self.todo,
            "quality": None,
            "kept": False,
        }


def _remedies(rag: RagKV, found: _Found) -> list[str]:
    """Advice that can be given without loading a model."""
    from ragkv.evaluation.environment import remedies

    assert found.stats is not None
    assert found.verified is not None
    todo = remedies(found.stats, None)
    if not found.verified.ok:
        findings = count(len(found.verified.findings), "finding")
        todo.append(f"{findings} in the index: ragkv verify --index {found.index} names them, ragkv repair mends them.")
    todo += [f"The {one.role} {one.name}: {one.what}" for one in found.models if one.state == "missing"]
    fetched = {one.role for one in found.models if one.state == "here" and one.name == rag.config.embedder}
    if found.stats.chunks and "embedder" in fetched:  # a check of one that is not here would download it
        try:
            rag.index.encoders.require_same()
        except RagkvError as error:
            todo.append(str(error))
    return todo


def _compare(rag: RagKV, found: _Found, chosen: _Comparison, *, as_json: bool, quiet: bool) -> None:
    """Compare every engine and codec with full attention."""
    from ragkv.evaluation.doctor import Doctor
    from ragkv.evaluation.draw import drawn
    from ragkv.evaluation.environment import JudgedModel, remedies
    from ragkv.evaluation.question import made_questions, read_questions
    from ragkv.evaluation.record import keep_quality
    from ragkv.evaluation.subject import Subject
    from ragkv.store import codec_names

    assert found.stats is not None
    read = None if chosen.questions is None else read_questions(chosen.questions)
    if not found.stats.chunks:
        index = found.index
        raise RetrievalError(f"The index at {index} holds no chunk; run ragkv ingest PATH --index {index} first.")
    subject = Subject.of(rag, chosen.model, device=chosen.device)
    examination = Doctor(
        rag,
        subject,
        engines=chosen.engines,
        codecs=codec_names() if chosen.codecs is None else chosen.codecs,
        top_k=chosen.top_k,
        max_new_tokens=chosen.max_new_tokens,
    )
    judged = JudgedModel.of(subject)
    todo = list(dict.fromkeys([*remedies(found.stats, subject), *found.todo]))
    if not as_json:
        _show_model(judged, todo)
    limit, seed = chosen.limit, chosen.seed
    asked = made_questions(rag.store, limit, seed) if read is None else drawn(read, limit, seed)
    source = "made from the index's own chunks" if read is None else str(chosen.questions)
    with steps("doctor", silent=quiet or as_json) as on_progress:
        quality = examination.examine(asked, source=source, seed=seed, on_progress=on_progress)
    kept = True
    try:
        keep_quality(rag.store, quality.to_json())
    except StoreError as error:
        kept = False
        note(f"The verdicts are not kept in the index: {error}")
    if as_json:
        quality_json = quality.to_json()
        print_json({**found.to_json(), "model": asdict(judged), "todo": todo, "quality": quality_json, "kept": kept})
        return
    _show_quality(quality)


def _show_model(judged: JudgedModel, todo: list[str]) -> None:
    table = facts(width=_NAMES)
    table.add_row(
        "model",
        f"{judged.model}: {judged.parameters / 1e6:,.1f}M parameters, {judged.dtype}, {judged.device}, "
        f"fingerprint {judged.fingerprint[:12]}, "
        + ("the one that made the index" if judged.same else "not the one that made the index"),
    )
    _todo(table, todo)
    draw(table)


def _todo(table: Table, todo: list[str]) -> None:
    for number, sentence in enumerate(todo or ["nothing"]):
        table.add_row("" if number else "to do", sentence)


def _show_quality(quality: Quality) -> None:
    say()
    say(
        f"{count(quality.questions, 'question')} ({quality.source}), {count(quality.tokens, 'token')} of answers by "
        f"full attention, top {quality.top_k}, seed {quality.seed}"
        + (f"; {quality.skipped} found no chunk" if quality.skipped else "")
    )
    table = plain("engine", "verdict", "KL", "top-1", "answers")
    if quality.gold:
        table.add_column("right")
        table.add_column("lost, points")
        table.add_row("full", "", "", "", "", share(quality.full_accuracy))
    for row in quality.engines:
        shares = [share(row.top1, row.ci95["top1"]), share(row.answers, row.ci95["answers"])]
        if row.accuracy is not None and quality.full_accuracy is not None:
            lost = f"{100 * (quality.full_accuracy - row.accuracy):+.1f}"
            shares += [share(row.accuracy), between(lost, row.ci95["loss"])]
        table.add_row(row.engine, _word(row.verdict), f"{row.kl:.3f}", *shares)
    draw(table)
    for row in quality.engines:
        say(f"{row.engine}: {row.advice}")
    note("In brackets: 95 % intervals over questions; the verdicts follow from these (docs/quality.md).")
    if quality.codecs:
        say()
        table = plain("codec", "engine", "verdict", "size", "KL", "top-1", "answers")
        for coded in quality.codecs:
            figures = ("bit-exact", "", "")
            if not coded.exact:
                figures = (f"{coded.kl:.4f}", share(coded.top1), share(coded.answers))
            table.add_row(coded.codec, coded.engine, _word(coded.verdict), share(coded.size), *figures)
        draw(table)
        for name, advice in {row.codec: row.advice for row in quality.codecs if not row.exact}.items():
            say(f"{name}: {advice}")


def _word(verdict: str) -> Text:
    return Text(verdict, style=_STYLE[verdict])
