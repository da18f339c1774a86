"""`ragkv doctor` compares engines and codecs with full attention; `ragkv tune` searches the best settings of APE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
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
    Threads,
    codec_lists,
    engine_lists,
    given_names,
)
from ragkv.config import CONFIG_FILE
from ragkv.errors import RagkvError, RetrievalError, StoreError, UsageError

if TYPE_CHECKING:
    from ragkv.doctor.health import ModelState
    from ragkv.doctor.tune import APESetting, Search
    from ragkv.doctor.verdicts import MetricValue, Quality
    from ragkv.pipeline import RagKV
    from ragkv.store import StoreStats, Verification

_NAMES = 12  # width of the names on the left, so that all tables of a run line up
_STYLE = {"good": "green", "fair": "yellow", "poor": "red", "not enough to tell": "dim"}
_USES = {
    "prompt": "earlier turns are used in the prompt and in the search",
    "search": "the model cannot use them, so earlier turns are used in the search only",
    None: "not enough to tell whether the model can use them; ask more questions with gold answers (--questions)",
}

# also those of `benchmarks/evaluation`
QUESTIONS = 'JSONL file: {"question": …, "answers": […]}'


def engines_option(unset: str | bool = True) -> Any:
    return typer.Option(
        "--engines",
        help='Engines, with options in parentheses: "block(over=standalone),pced(gamma=0)".',
        show_default=unset,
        autocompletion=engine_lists,
    )


def codecs_option(about: str, unset: str | bool = True) -> Any:
    return typer.Option("--codecs", help=about, show_default=unset, autocompletion=codec_lists)


Limit = Annotated[int | None, typer.Option(help="Ask at most this many questions.", min=1, show_default="all")]
TopK = Annotated[int | None, typer.Option(help="Chunks per question.", min=1, show_default="the index's")]
MaxNewTokens = Annotated[int, typer.Option(help="Most tokens of an answer.", min=1)]
Seed = Annotated[int, typer.Option(help="Seed of all that is drawn: questions, halves, intervals.")]


def doctor(
    index: Index = DEFAULT_INDEX,
    model: Annotated[
        str | None,
        typer.Option(help="Judge this model on the index's documents; no KV is stored.", show_default="the index's"),
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(help=f"{QUESTIONS}, answers optional.", show_default="made from the index's chunks"),
    ] = None,
    engines: Annotated[str | None, engines_option("the index's, and those that could replace them")] = None,
    codecs: Annotated[str | None, codecs_option("Codecs to judge; `none` for none.", "all")] = None,
    limit: Annotated[
        int, typer.Option(help="Ask at most this many questions; the verdict `good` needs about sixty.", min=1)
    ] = 100,
    top_k: TopK = None,
    max_new_tokens: MaxNewTokens = 64,
    seed: Seed = 0,
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
    threads: Threads = None,
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
    from ragkv.doctor.health import Environment, models_present, remedies
    from ragkv.doctor.questions import draw_sample, made_questions, read_questions
    from ragkv.doctor.report import Doctor, compared_engines
    from ragkv.doctor.retrieval import judged_questions, measure_retrieval, names_gold
    from ragkv.doctor.specs import Spec, parse_specs
    from ragkv.engines import engine_class
    from ragkv.index.quality import keep_quality
    from ragkv.pipeline import RagKV
    from ragkv.store import codec_from_config, codec_names
    from ragkv.types import Capability

    compares = any(value is not None for value in (model, questions, engines, codecs)) or quick
    if health and compares:
        raise UsageError("--health compares nothing; leave out the options of the comparison, or --health.")
    specs = None if engines is None else compared_engines(parse_specs(engines))
    coded = None if codecs is None else [] if codecs.strip() == "none" else given_names("--codecs", codecs)
    for spec in specs or ():
        engine_class(spec.name)
    for codec in coded or ():
        codec_from_config({"id": codec})
    file = None if questions is None else read_questions(questions)
    environment = Environment.look()
    report: dict[str, Any] = {
        "environment": asdict(environment), "index": None, "model": None, "todo": [], "quality": None, "kept": False
    }  # fmt: skip
    table = facts(width=_NAMES)
    table.add_row("versions", ", ".join(f"{name} {version}" for name, version in environment.versions.items()))
    table.add_row("devices", "; ".join(environment.devices))
    if not (index / CONFIG_FILE).exists() and index == DEFAULT_INDEX and not compares:
        _add_models(table, report, models_present(None))
        report["todo"] = [f"There is no index here: ragkv ingest PATH makes {index}."]
        _add_todo(table, report)
        print_json(report) if as_json else draw(table)
        return
    with RagKV.open(index, device=device) as rag:
        stats = rag.store.stats()
        _add_models(table, report, models := models_present(rag.config))
        table.add_row("index", f"{index}: {_contents(stats)}")
        if not as_json:
            draw(table)
        with progress_bar(quiet or as_json) as on_progress:
            verified = rag.maintenance.verify(quick=True, on_progress=on_progress)
        report["index"] = {"folder": str(index), **asdict(stats), "health": verified.to_json()}
        report["todo"] = [*remedies(stats, None), *_remedies(rag, stats, verified, models)]
        table = facts(width=_NAMES)
        state = "no damage" if verified.ok else count(len(verified.findings), "finding")
        table.add_row("health", f"{state} (KV payloads not read: ragkv verify reads them)")
        for name, derived in verified.derived.items():
            table.add_row("", f"{name} index: {derived}")
        if health:
            _add_todo(table, report)
        if not as_json:
            draw(table)
        if health:
            if as_json:
                print_json(report)
            return
        if quick:
            limit, max_new_tokens = min(limit, 8), min(max_new_tokens, 16)
            specs = specs or [Spec(name) for name in rag.config.engines]
        if coded is None:
            coded = [rag.config.codec] if quick else codec_names()
        if not stats.chunks:
            raise RetrievalError(f"The index at {index} holds no chunk; run ragkv ingest PATH --index {index} first.")
        judge = Doctor(rag, model, engines=specs, codecs=coded, top_k=top_k, max_new_tokens=max_new_tokens)
        if codecs is not None and coded and Capability.TENSORS in judge.reader.model.missing_capabilities:
            raise UsageError("The runtime llama-cpp stores states of its own, which no codec changes; omit --codecs.")
        report["model"] = judge.reader.to_json()
        report["todo"] = list(dict.fromkeys([*remedies(stats, judge.reader), *report["todo"]]))
        if not as_json:
            _show_model(report)
        gold = None
        if questions is not None and names_gold(questions):
            try:
                gold = judged_questions(questions, rag.store)
            except RetrievalError as error:
                note(str(error))
        asked = made_questions(rag.store, limit, seed) if file is None else draw_sample(file, limit, seed)
        source = "made from the index's own chunks" if file is None else str(questions)
        with steps("doctor", silent=quiet or as_json) as on_progress:
            modes = () if gold is None else measure_retrieval(rag, gold.sample(limit, seed), seed=seed)
            quality = judge.examine(asked, source=source, seed=seed, retrieval=modes, on_progress=on_progress)
        report |= {"quality": quality.to_json(), "kept": True}
        try:
            keep_quality(rag.store, report["quality"])
        except StoreError as error:
            report["kept"] = False
            note(f"The verdicts are not kept in the index: {error}")
        if as_json:
            print_json(report)
        else:
            _show_quality(quality)
            _show_retrieval(quality.retrieval)
            _show_conversation(quality, rag.config.history)


def _add_models(table: Table, report: dict[str, Any], models: Sequence[ModelState]) -> None:
    report["environment"]["models"] = [asdict(model) for model in models]
    for number, model in enumerate(models):
        weighs = "" if model.bytes is None else f", {size(model.bytes)}"
        table.add_row("" if number else "models", f"{model.role} {model.name}: {model.state} ({model.what}{weighs})")


def _contents(stats: StoreStats) -> str:
    held = (count(stats.documents, "document"), count(stats.chunks, "chunk"), count(stats.tokens, "token"))
    return f"{', '.join(held)}; {count(stats.kv_records, 'KV record')}, {size(stats.kv_bytes)}"


def _remedies(rag: RagKV, stats: StoreStats, verified: Verification, models: Sequence[ModelState]) -> list[str]:
    """Advice that can be given without loading a model."""
    todo = []
    if not verified.ok:
        findings = count(len(verified.findings), "finding")
        todo.append(f"{findings} in the index: ragkv verify --index {rag.folder} names them; run ragkv repair.")
    todo += [f"The {model.role} {model.name}: {model.what}" for model in models if model.state == "missing"]
    here = {model.role for model in models if model.state == "here" and model.name == rag.config.embedder}
    if stats.chunks and "embedder" in here:  # checking a model that is not on this machine would download it
        try:
            rag.index.encoders.require_same_embedder()
        except RagkvError as error:
            todo.append(str(error))
    return todo


def _show_model(report: dict[str, Any]) -> None:
    model, table = report["model"], facts(width=_NAMES)
    table.add_row(
        "model",
        f"{model['model']}: {model['parameters'] / 1e6:,.1f}M parameters, {model['dtype']}, {model['device']}, "
        f"fingerprint {model['fingerprint'][:12]}, "
        + ("the one that made the index" if model["same"] else "not the one that made the index"),
    )
    _add_todo(table, report)
    draw(table)


def _add_todo(table: Table, report: dict[str, Any]) -> None:
    for number, sentence in enumerate(report["todo"] or ["nothing"]):
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
    questions: Annotated[Path, typer.Argument(help=f"{QUESTIONS}.", metavar="FILE.jsonl")],
    index: Index = DEFAULT_INDEX,
    limit: Limit = None,
    top_k: TopK = None,
    max_new_tokens: MaxNewTokens = 64,
    holdout: Annotated[
        bool, typer.Option("--holdout", help="Search on one half of the questions, and validate on the other.")
    ] = False,
    seed: Seed = 0,
    dry_run: DryRun = False,
    device: Device = None,
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Search APE's temperature T and scale S on your questions, and write the best into the index.

    The search is greedy, as in the paper: first T, then S, in steps of 0.1. An answer is right if it contains a gold
    answer.

    Example: `ragkv tune questions.jsonl --index my-index --holdout`
    """
    from ragkv.doctor.questions import draw_sample, golden_questions
    from ragkv.doctor.tune import Tuner, split, write_setting
    from ragkv.pipeline import RagKV

    golden, without = golden_questions(questions)
    if without and not quiet:
        note(f"{count(without, 'question')} without a gold answer left out.")
    asked = draw_sample(golden, limit, seed)
    asked, held_out = split(asked, seed) if holdout else (asked, [])
    with RagKV.open(index, device=device, readonly=True) as rag:
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
    if (half := search.held_out) is None:
        echo("Measured on the questions of the search; --holdout validates on others.")
    else:
        echo(
            f"Held-out half, {count(half.asked, 'question')}: {half.winner} right with the best setting, "
            f"{half.now} as it was, {half.full} by full attention."
        )
    if search.winner == search.now:
        echo(f"{index} already has the best setting.")
        return
    echo(f"{'Would write' if dry_run else 'Wrote'} to {index}: {_named(search.winner)} (before: {_named(search.now)}).")


def _named(setting: APESetting) -> str:
    return f"temperature = {setting.temperature:g}, scale = {setting.scale:g}"
