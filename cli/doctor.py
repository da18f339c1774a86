"""`ragkv doctor` compares engines and codecs with full attention; `ragkv tune` searches the best settings of APE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ragkv.cli.console import (
    between,
    count,
    draw,
    echo,
    facts,
    note,
    plain,
    print_json,
    progress_bar,
    share,
    size,
    steps,
    three_digits,
)
from ragkv.cli.options import (
    DEFAULT_INDEX,
    Device,
    DryRun,
    Index,
    Json,
    Quiet,
    codec_lists,
    engine_lists,
    given_names,
)
from ragkv.config import CONFIG_FILE
from ragkv.errors import RagkvError, RetrievalError, StoreError, UsageError

if TYPE_CHECKING:
    from ragkv.doctor.metrics import MetricValue
    from ragkv.doctor.report import Environment, JudgedModel, ModelState, Quality
    from ragkv.doctor.tune import APESetting, Search
    from ragkv.pipeline import RagKV
    from ragkv.store import StoreStats, Verification

_NAMES = 12  # width of the names on the left, so that all tables of a run line up
_STYLE = {"good": "green", "fair": "yellow", "poor": "red", "not enough to tell": "dim"}
_USES = {
    "prompt": "earlier turns are used in the prompt and in the search",
    "search": "the model cannot use them, so earlier turns are used in the search only",
    None: "not enough to tell whether the model can use them; ask more questions with gold answers (--questions)",
}


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
        typer.Option(
            help='Engines to judge, with options in parentheses: "block(over=standalone),pced".',
            show_default="the index's, and those that could replace them",
            autocompletion=engine_lists,
        ),
    ] = None,
    codecs: Annotated[
        str | None,
        typer.Option(help="Codecs to judge; `none` for none.", show_default="all", autocompletion=codec_lists),
    ] = None,
    limit: Annotated[
        int, typer.Option(help="Ask at most this many questions; the verdict `good` needs about sixty.", min=1)
    ] = 100,
    top_k: Annotated[int | None, typer.Option(help="Chunks per question.", min=1, show_default="the index's")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=1)] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the draw of questions.")] = 0,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="8 questions, 16 tokens, the index's engines and codec: rarely enough for a verdict."
        ),
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
    (good, fair, poor, or not enough to tell), which is kept in the index and shown by `ragkv stats`. Times to the first
    token are also shown, and one setting is proposed. Where lines of --questions name gold passages ("sources",
    "evidence"), recall and MRR of every mode of retrieval are shown too. A poor verdict is a result, so the exit code
    is 0. Without an index, or with --health, nothing is compared.

    Example: `ragkv doctor --questions questions.jsonl`
    """
    from ragkv.doctor.io import (
        Spec,
        keep_quality,
        made_questions,
        parse_specs,
        read_questions,
    )
    from ragkv.doctor.metrics import draw_sample
    from ragkv.doctor.report import (
        Doctor,
        Environment,
        JudgedModel,
        compared_engines,
        models_present,
        remedies,
    )
    from ragkv.doctor.retrieval import judged_questions, measure_retrieval, names_gold
    from ragkv.engines import engine_class
    from ragkv.pipeline import RagKV
    from ragkv.store import codec_from_config, codec_names

    asked_for = any(given is not None for given in (model, questions, engines, codecs)) or quick
    if health and asked_for:
        raise UsageError("--health compares nothing; leave out the options of the comparison, or --health.")
    judged = None if engines is None else parse_specs(engines)
    coded = None if codecs is None else [] if codecs.strip() == "none" else given_names("--codecs", codecs)
    for spec in judged or ():
        engine_class(spec.name)
    if judged is not None:
        compared_engines(judged)
    for codec in coded or ():
        codec_from_config({"id": codec})
    read = None if questions is None else read_questions(questions)
    environment = Environment.look()
    if not (index / CONFIG_FILE).exists() and index == DEFAULT_INDEX and not asked_for:
        status = _Found(
            environment, models_present(None), [f"There is no index here: ragkv ingest PATH makes {index}."]
        )
        if as_json:
            print_json(status.to_json())
        else:
            status.show()
        return
    with RagKV.open(index, device=device) as rag:
        stats = rag.store.stats()
        status = _Found(environment, models_present(rag.config), [], index=index, stats=stats)
        if not as_json:
            status.show()
        with progress_bar(quiet or as_json) as on_progress:
            status.verified = rag.maintenance.verify(quick=True, on_progress=on_progress)
        status.todo = _remedies(rag, status)
        if not as_json:
            status.show_health(todo=health)
        if health:
            if as_json:
                print_json(status.to_json())
            return
        if quick:
            limit, max_new_tokens = min(limit, 8), min(max_new_tokens, 16)
            judged = judged or [Spec(name) for name in rag.config.engines]
        if coded is None:
            coded = [rag.config.codec] if quick else codec_names()
        if not stats.chunks:
            raise RetrievalError(f"The index at {index} holds no chunk; run ragkv ingest PATH --index {index} first.")
        examination = Doctor(
            rag,
            model,
            engines=judged,
            codecs=coded,
            top_k=top_k,
            max_new_tokens=max_new_tokens,
            device=device,
        )
        subject = JudgedModel.of(examination.subject)
        status.todo = list(dict.fromkeys([*remedies(stats, examination.subject), *status.todo]))
        if not as_json:
            _show_model(subject, status.todo)
        gold = None
        if questions is not None and names_gold(questions):
            try:
                gold = judged_questions(questions, rag.store)
            except RetrievalError as error:
                note(str(error))
        asked = made_questions(rag.store, limit, seed) if read is None else draw_sample(read, limit, seed)
        source = "made from the index's own chunks" if read is None else str(questions)
        with steps("doctor", silent=quiet or as_json) as on_progress:
            judged_modes = () if gold is None else measure_retrieval(rag, gold.sample(limit, seed), seed=seed)
            quality = examination.examine(
                asked, source=source, seed=seed, retrieval=judged_modes, on_progress=on_progress
            )
        is_stored = True
        try:
            keep_quality(rag.store, quality.to_json())
        except StoreError as error:
            is_stored = False
            note(f"The verdicts are not kept in the index: {error}")
        if as_json:
            print_json({**status.to_json(), "model": asdict(subject), "quality": quality.to_json(), "kept": is_stored})
        else:
            _show_quality(quality)
            _show_retrieval(quality.retrieval)
            _show_conversation(quality, rag.config.history)


@dataclass(slots=True)
class _Found:
    """The findings that need no model; each is shown as soon as it is known."""

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


def _remedies(rag: RagKV, status: _Found) -> list[str]:
    """Advice that can be given without loading a model."""
    from ragkv.doctor.report import remedies

    assert status.stats is not None
    assert status.verified is not None
    todo = remedies(status.stats, None)
    if not status.verified.ok:
        findings = count(len(status.verified.findings), "finding")
        todo.append(f"{findings} in the index: ragkv verify --index {status.index} names them; run ragkv repair.")
    todo += [f"The {one.role} {one.name}: {one.what}" for one in status.models if one.state == "missing"]
    fetched = {one.role for one in status.models if one.state == "here" and one.name == rag.config.embedder}
    if status.stats.chunks and "embedder" in fetched:  # checking a model that is not on this machine would download it
        try:
            rag.index.encoders.require_same_embedder()
        except RagkvError as error:
            todo.append(str(error))
    return todo


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
    echo()
    echo(
        f"{count(quality.questions, 'question')} ({quality.source}), {count(quality.tokens, 'token')} of answers by "
        f"full attention, top {quality.top_k}, seed {quality.seed}"
        + (f"; {quality.skipped} found no chunk" if quality.skipped else "")
    )
    table = plain("engine", "verdict", "KL", "top-1", "answers")
    table.columns[0].no_wrap = True
    if quality.gold:
        table.add_column("right")
        table.add_column("lost, points")
        table.add_row("full", "", "", "", "", share(quality.full_accuracy))
    for row in quality.engines:
        shares = [share(row.top1, row.ci95["top1"]), share(row.answers, row.ci95["answers"])]
        if row.accuracy is not None and quality.full_accuracy is not None:
            lost = f"{100 * (quality.full_accuracy - row.accuracy):+.1f}"
            shares += [share(row.accuracy), between(lost, row.ci95["loss"])]
        table.add_row(row.label, _word(row.verdict), f"{row.kl:.3f}", *shares)
    draw(table)
    echo()
    table = plain("engine", "first token", "KV read")
    table.add_row("full", _milliseconds(quality.full_first_token), "")
    for row in quality.engines:
        table.add_row(row.label, _milliseconds(row.first_token), size(row.kv_bytes))
    draw(table)
    echo()
    for row in quality.engines:
        echo(f"{row.label}: {row.advice}")
    echo(quality.proposal)
    note("In brackets: 95 % intervals over questions; the verdicts follow from these (docs/quality.md).")
    if quality.codecs:
        echo()
        table = plain("codec", "engine", "verdict", "size", "KL", "top-1", "answers")
        for coded in quality.codecs:
            figures = ("bit-exact", "", "")
            if not coded.exact:
                figures = (f"{coded.kl:.4f}", share(coded.top1), share(coded.answers))
            table.add_row(coded.codec, coded.engine, _word(coded.verdict), share(coded.size), *figures)
        draw(table)
        for name, advice in {row.codec: row.advice for row in quality.codecs if not row.exact}.items():
            echo(f"{name}: {advice}")


def _show_retrieval(rows: Sequence[MetricValue]) -> None:
    """A row per mode: recall and MRR of the gold passages that the file names."""
    metrics = list(dict.fromkeys(row.metric for row in rows))
    if not metrics:
        return
    echo()
    table = plain("retrieval", *metrics)
    for mode in dict.fromkeys(row.engine for row in rows):
        table.add_row(mode, *(share(row.value, row.ci95) for row in rows if row.engine == mode))
    draw(table)
    echo(f"retrieval: {count(rows[0].n, 'question')} with a gold passage in the index.")


def _milliseconds(seconds: float) -> str:
    return f"{three_digits(seconds * 1000)} ms"


def _show_conversation(quality: Quality, setting: str) -> None:
    """Show how earlier turns of a conversation change answers, and how they are used."""
    row = quality.conversation
    if row is None:
        return
    shares = f"top-1 {share(row.top1)}, answers {share(row.answers)}"
    if row.alone is not None and row.accuracy is not None:
        shares = f"right {share(row.accuracy)}, alone {share(row.alone)}"
    echo()
    echo(f"conversation: {row.engine} with {row.turns} earlier turns in the prompt: {shares}; {_USES[row.history]}.")
    if setting != "auto":
        note(f'ragkv.toml says history = "{setting}", whatever was measured; "auto" follows it.')


def _word(verdict: str) -> Text:
    return Text(verdict, style=_STYLE[verdict])


def tune(
    questions: Annotated[
        Path, typer.Argument(help='JSONL file: {"question": …, "answers": […]}.', metavar="FILE.jsonl")
    ],
    index: Index = DEFAULT_INDEX,
    limit: Annotated[
        int | None, typer.Option(help="Ask at most this many questions.", min=1, show_default="all")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Chunks per question.", min=1, show_default="the index's")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=1)] = 64,
    holdout: Annotated[
        bool, typer.Option("--holdout", help="Search on one half of the questions, and validate on the other.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the draw of questions and of the half that is held out.")] = 0,
    dry_run: DryRun = False,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Search APE's temperature T and scale S on your questions, and write the best into the index.

    The search is greedy, as in the paper: first T, then S, in steps of 0.1. An answer is right if it contains a gold
    answer.

    Example: `ragkv tune questions.jsonl --index my-index --holdout`
    """
    from ragkv.doctor.io import golden_questions
    from ragkv.doctor.metrics import draw_sample
    from ragkv.doctor.tune import Tuner, split, write_setting
    from ragkv.pipeline import RagKV

    golden, without = golden_questions(questions)
    if without and not quiet:
        note(f"{count(without, 'question')} without a gold answer left out.")
    asked = draw_sample(golden, limit, seed)
    asked, held_out = split(asked, seed) if holdout else (asked, [])
    with RagKV.open(index, device=device) as rag:
        rag.index.require_same_model()
        tuner = Tuner(rag, top_k=top_k, max_new_tokens=max_new_tokens)
        with steps("tune", silent=quiet or as_json, stages=True) as on_progress:
            search = tuner.search(asked, held_out=held_out, on_progress=on_progress)
        written = not dry_run and search.winner != search.now
        if written:
            write_setting(rag.folder, search.winner)
    if as_json:
        print_json({**search.to_json(), "written": written})
        return
    _show(search)
    _conclude(search, index, dry_run=dry_run)


def _show(search: Search) -> None:
    table = plain("stage", "T", "S", "right", "", "")
    table.add_row("full", "", "", f"{search.full} of {search.asked}", f"{search.full / search.asked:.1%}", "")
    for trial in search.trials:
        setting = trial.setting
        marks = [word for word, which in (("as it was", search.now), ("best", search.winner)) if setting == which]
        table.add_row(
            trial.stage,
            f"{setting.temperature:g}",
            f"{setting.scale:g}",
            f"{trial.right} of {trial.asked}",
            "given up" if trial.given_up else f"{trial.right / trial.asked:.1%}",
            ", ".join(marks),
            style="bold" if setting == search.winner else None,
        )
    draw(table)


def _conclude(search: Search, index: Path, *, dry_run: bool) -> None:
    if search.skipped:
        echo(f"{count(search.skipped, 'question')} found no chunk and were left out.")
    held = search.held_out
    if held is None:
        echo("Measured on the questions of the search; --holdout validates on others.")
    else:
        echo(
            f"Held-out half, {count(held.asked, 'question')}: {held.winner} right with the best setting, "
            f"{held.now} as it was, {held.full} by full attention."
        )
    if search.winner == search.now:
        echo(f"{index} already has the best setting.")
        return
    echo(f"{'Would write' if dry_run else 'Wrote'} to {index}: {_named(search.winner)} (before: {_named(search.now)}).")


def _named(setting: APESetting) -> str:
    return f"temperature = {setting.temperature:g}, scale = {setting.scale:g}"
