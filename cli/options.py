"""Options that several commands share, and where the value of a setting comes from.

The order is flag, environment variable, index, user file, default. Settings that an index was built with are in its
`ragkv.toml` and cannot be overridden: `ragkv ingest` refuses a flag or variable that contradicts them, and a question
may choose only the settings in `CHOSEN`. The user file holds defaults for new indexes, and the index and device to use
when nothing else names them. Only the command line reads variables and the user file; `RagKV` does not.
"""

from __future__ import annotations

import ctypes
import inspect
import logging
import os
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

import typer

from ragkv.cli.console import note_wait
from ragkv.config import (
    CONFIG_FILE,
    MODELS,
    MODES,
    EncodingConfig,
    IndexConfig,
    StepsConfig,
    build_config,
    config_in,
)
from ragkv.errors import ConfigError, KVMismatchError, ModelLoadError, UsageError
from ragkv.model.checkpoint import lasting
from ragkv.question import question_arguments, question_options
from ragkv.util.display import one_line
from ragkv.util.files import read_toml, shortened, user_folder
from ragkv.util.options import OptionField, at_door, options_of
from ragkv.util.processors import COUNTS, use_threads, watch_processors


def engines(incomplete: str) -> list[str]:
    """Names of engines."""
    from ragkv.util.plugins import ENGINES

    return [name for name in ENGINES.names() if name.startswith(incomplete)]


def codecs(incomplete: str) -> list[str]:
    """Names of codecs."""
    from ragkv.store import codec_names

    return [name for name in codec_names() if name.startswith(incomplete)]


def one_among(choices: Sequence[str]) -> Callable[[str], list[str]]:
    """Completion by the choices."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in choices if name.startswith(incomplete)]

    return complete


def indexes(incomplete: str) -> list[str]:
    """Folders that are indexes, then other folders, which may contain one (with a slash at the end)."""
    before = incomplete[: incomplete.rfind("/") + 1]
    folder = Path(before or ".").expanduser()
    try:
        inside = sorted(
            path
            for path in folder.iterdir()
            if path.is_dir()
            and not path.name.startswith(".")
            and path.name == one_line(path.name)  # skip names with control characters, which nobody can type
        )
    except OSError:
        return []
    names = {path: f"{before}{path.name}" for path in inside}
    found = [name for path, name in names.items() if (path / CONFIG_FILE).is_file()]
    leading = [f"{name}/" for path, name in names.items() if not (path / CONFIG_FILE).is_file()]
    return [name for name in [*found, *leading] if name.startswith(incomplete)]


def _listed(names: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    """Names for the last part of a list with commas."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [before + comma + name for name in names(last) if name not in before.split(",")]

    return complete


engine_lists, codec_lists, mode_lists = _listed(engines), _listed(codecs), _listed(one_among(MODES))

USED: Mapping[str, type] = {"index": str, "device": str, "threads": int, "resident": bool}
"""Further settings of the user file besides the fields of `IndexConfig`; they belong to the user, not to an index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedFolder:
    """A `[[watch]]` of the user file: a folder that `ragkv serve` follows for an index. It is not in `ragkv.toml`,
    because a foreign index could then read any of the user's files."""

    index: str = ""
    folder: str = ""
    prune: bool = False


VARIABLES: Mapping[str, str] = {
    **{
        name: f"RAGKV_{name.upper()}"
        for name in ("index", "device", "threads", "model", "dtype", "engines", "chunk_tokens")
    },
    **{name: f"RAGKV_{name.upper()}" for name in (*USED, "model", "dtype", "engines", "chunk_tokens")},
    **{name: f"RAGKV_{name.upper()}" for name in ("codec", "embedder", "reranker", "top_k")},
    "default_engine": "RAGKV_ENGINE",
    "executor": "RAGKV_RUNTIME",
}
"""Environment variable of each setting that has one."""

FLAGS: Mapping[str, str] = {
    **{name: "--" + variable.removeprefix("RAGKV_").lower().replace("_", "-") for name, variable in VARIABLES.items()},
    "tuning": "--block-tokens",
    "encoding": "--context-tokens",
    "prompt": "--system",
}
"""The option of each such setting, named like its variable."""

CHANGEABLE = (
    *("kv", "kv_budget", "memory_budget", "default_engine", "top_k", "history", "prompt.question"),
    *(f"steps.{each.name}" for each in fields(StepsConfig)),
)
"""The settings that do not affect what is already in an index; `ragkv config set` changes them."""

CHOSEN = (*USED, "default_engine", "top_k")
"""The settings that a question may choose, regardless of the index."""


def contradicted(config: IndexConfig, given: Mapping[str, Any]) -> list[str]:
    """The given settings that contradict those of the index; settings that a question may choose never do."""
    return [
        name for name, value in given.items() if name not in CHOSEN and not _same(name, getattr(config, name), value)
    ]


def _same(name: str, recorded: Any, asked: Any) -> bool:
    """Whether a setting has the value already; a model's folder may be named from anywhere."""
    if name in MODELS and isinstance(recorded, str) and isinstance(asked, str):
        return lasting(recorded) == lasting(asked)
    return bool(recorded == asked)


def require_same(folder: Path, config: IndexConfig, settings: Mapping[str, Any]) -> None:
    """KVMismatchError for the first of the given settings that contradicts the index."""
    for name in contradicted(config, settings):
        variable, flag = VARIABLES.get(name, ""), FLAGS.get(name, f"--{name}")
        flag = flag.replace("_", "-")
        remedy = f"leave {flag} out" + (f" and {variable} unset" if variable in os.environ else "")
        if name in CHANGEABLE:
            value, at = shlex.quote(str(settings[name])), shlex.quote(str(folder))
            remedy += f", or change it with: ragkv config set {name}={value} --index {at}"
        recorded, asked = getattr(config, name), settings[name]
        if name == "prompt":
            remedy += f", or change [prompt] in its {CONFIG_FILE} and ingest again"
            field = next(f.name for f in fields(recorded) if getattr(recorded, f.name) != getattr(asked, f.name))
            name, recorded, asked = f"prompt.{field}", getattr(recorded, field), getattr(asked, field)
        raise KVMismatchError(
            f"The index at {folder} was made with {name} = {shown_value(recorded)}, not {shown_value(asked)}; use "
            f"another --index, or {remedy}."
        )


def shown_value(value: object) -> str:
    """A setting's value in a message or a table."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if value is None:
        return "unset"
    if is_dataclass(value) and not isinstance(value, type):
        return ", ".join(f"{name} {each}" for name, each in asdict(value).items())
    return repr(value) if isinstance(value, str) and (not value or "\n" in value) else str(value)


def user_file() -> Path:
    """Where the user file is, or would be: `$XDG_CONFIG_HOME/ragkv/config.toml`, else `~/.config/ragkv/config.toml`."""
    return user_folder("XDG_CONFIG_HOME", ".config") / "ragkv" / "config.toml"


_NAMES = frozenset({"engines", "default_engine", "tuning", "codec", "index_factory"})
"""The settings that `check_names` looks at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFile:
    """A user file: `table` as it is written, and `settings`, the checked fields of `IndexConfig` in it."""

    path: Path
    table: Mapping[str, Any]
    settings: Mapping[str, Any]
    watch: Sequence[WatchedFolder] = ()

    @classmethod
    def read(cls, path: Path) -> Self:
        """The file at `path`, empty if there is none. ConfigError says what is wrong in it."""
        table = read_toml(path) if path.exists() else {}
        watch = table.pop("watch", [])
        known = {*USED, "watch", *(f.name for f in fields(IndexConfig))}
        if not isinstance(watch, list) or not all(isinstance(folder, dict) for folder in watch):
            raise ConfigError(f"{path}: watched folders are tables [[watch]] with an index and a folder.")
        for key, value in table.items():
            if key not in known:
                raise ConfigError(f"{path}: unknown key {key!r}; remove it, or use one of {', '.join(sorted(known))}.")
            kind = USED.get(key)
            valid = value.strip() if isinstance(value, str) else kind is bool or (isinstance(value, int) and value > 0)
            if kind and not (valid and type(value) is kind):
                wanted = {str: "a string that is not empty", int: "a number from 1 up", bool: "true or false"}[kind]
                raise ConfigError(f"{path}: {key} = {shortened(value)} must be {wanted}.")
        settings = {key: value for key, value in table.items() if key not in USED}
        # some settings are only valid with an embedder; which one is not known yet, so name any
        checked = config_in(path, {"embedder": "mini"} | settings)
        if settings.keys() & _NAMES:  # an import of 0.15 s, half of what a question to a running server takes
            from ragkv.index.index import check_names

            check_names(checked, path)
        folders = [build_config(WatchedFolder, folder, f"{path} [[watch]]") for folder in watch]
        return cls(path=path, table=table, settings={key: getattr(checked, key) for key in settings}, watch=folders)


DEFAULT_INDEX = Path("ragkv-index")
RUNTIME = "Many questions"
_LENGTH = re.compile("[0-9]{1,9}")


def source_of(ctx: typer.Context, name: str) -> str:
    """click's name for where a parameter's value comes from, such as COMMANDLINE or ENVIRONMENT."""
    source = ctx.get_parameter_source(name)
    return "" if source is None else source.name


def _index(ctx: typer.Context, value: Path) -> Path:
    """The index that the user file names, if neither the option nor the variable does."""
    if source_of(ctx, "index") in ("COMMANDLINE", "ENVIRONMENT") or ctx.resilient_parsing:
        return value
    chosen = UserFile.read(user_file()).table.get("index")
    return value if chosen is None else Path(chosen).expanduser()


def _device(ctx: typer.Context, value: str | None) -> str | None:
    if ctx.resilient_parsing:
        return value
    value = UserFile.read(user_file()).table.get("device") if value is None else value
    if value is not None and value.strip().startswith("cuda") and not find_spec("llama_cpp"):  # which has its own
        _require_cuda(value)
    return value


def _threads(ctx: typer.Context, value: int | None) -> int | None:
    """Use so many threads, from now on; without a number, as many as processors are idle when the model is loaded."""
    if ctx.resilient_parsing:
        return value
    if value is None and os.environ.keys().isdisjoint(COUNTS):
        value = UserFile.read(user_file()).table.get("threads")
    if value is None:
        watch_processors(idle=ctx.info_name not in ("serve", "mcp"))
    else:
        use_threads(value)
    return value


def _require_cuda(name: str) -> None:
    """ModelLoadError for a GPU that torch or the machine does not support, without importing torch."""
    spec = find_spec("torch")
    version = runpy.run_path(str(Path(spec.origin).with_name("version.py"))) if spec and spec.origin else {}
    if version.get("hip"):  # AMD's GPUs are called cuda, too
        return
    missing = "" if version.get("cuda") else "the torch that is installed is built without CUDA"
    if not missing and sys.platform == "linux":
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            missing = "this machine has no driver of NVIDIA"
    if missing:
        raise ModelLoadError(f"Device {name!r} is not available: {missing}; leave --device out to use the CPU.")


def _without_warnings(ctx: typer.Context, value: bool) -> bool:
    """Log errors only; a server's log keeps its warnings, and with `--debug` everything is logged."""
    log = logging.getLogger()
    if value and not ctx.resilient_parsing and ctx.info_name not in ("serve", "mcp") and log.level == logging.WARNING:
        log.setLevel(logging.ERROR)
    return value


def _folder(ctx: typer.Context, value: Path | None) -> Path | None:
    if value is not None and not value.is_dir() and not ctx.resilient_parsing:
        raise UsageError(f"{value} is not a folder; make it, or leave --folder out.")
    return value


def block_tuning(text: str | None) -> dict[str, dict[str, int]]:
    """`[tuning.apb]` of `--block-tokens`: l_b, or l_b, l_a and l_p; UsageError for anything else."""
    if text is None:
        return {}
    numbers = [number.strip() for number in text.split(",")]
    if len(numbers) not in (1, 3) or not all(_LENGTH.fullmatch(number) for number in numbers):
        raise UsageError(
            f"--block-tokens is the length of a block, as in 4096, or of block, anchor and what is passed on, as in "
            f"4096,1024,512; not {shortened(text)}."
        )
    return {"apb": dict(zip(("block", "anchor", "passing"), map(int, numbers), strict=False))}


def without_server(no_server: bool) -> bool:
    """Whether the command should work without a server, as asked for or because of `--debug`."""
    return no_server or logging.getLogger().isEnabledFor(logging.DEBUG)


def given_values(**options: Any) -> dict[str, Any]:
    """The options that were given a value; the others are left to the index or the defaults."""
    return {name: value for name, value in options.items() if value is not None}


def wait(no_wait: bool) -> dict[str, Any]:
    """How a job waits for another process that writes to the index: arguments of `RagKV.ingest`, `.gc` and others."""
    return {"timeout": 0 if no_wait else None, "on_wait": note_wait}


def encoding_of(context_tokens: int | None) -> EncodingConfig | None:
    """`[encoding]` of `--context-tokens`; None leaves it to the index or the defaults."""
    return None if context_tokens is None else EncodingConfig(context=context_tokens)


def split_names(text: str | None) -> tuple[str, ...] | None:
    """ "ape, block" -> ("ape", "block"); None stays None."""
    return None if text is None else tuple(name.strip() for name in text.split(",") if name.strip())


def given_names(option: str, text: str) -> list[str]:
    """The names of a list, each once and in order; UsageError if there is none."""
    names = list(dict.fromkeys(split_names(text) or ()))
    if not names:
        raise UsageError(f"{option} is empty; write a list of names with commas between them.")
    return names


def given_numbers(option: str, text: str, *, least: int = 1, most: int | None = None) -> list[int]:
    """The whole numbers of a list, each once and in order; UsageError for anything else, or beyond the bounds."""
    try:
        numbers = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least or (most is not None and max(numbers) > most):
        bounds = f"from {least} up" if most is None else f"from {least} to {most}"
        raise UsageError(f"{option} {text!r} is not a list of numbers {bounds}; write one such as 1,8,32.")
    return numbers


def _option(setting: str, **more: Any) -> Any:
    """`typer.Option` with the flag and the environment variable of a setting."""
    return typer.Option(FLAGS[setting], envvar=VARIABLES[setting], **more)


Index = Annotated[
    Path,
    _option("index", help="Folder of the index.", callback=_index, autocompletion=indexes),
]
Device = Annotated[
    str | None,
    _option(
        "device",
        help="cpu, cuda, cuda:1, …; cuda:0,cuda:1 splits the model's layers, auto does if one GPU is too small.",
        show_default="cuda if there is one",
        callback=_device,
    ),
]
Threads = Annotated[
    int | None,
    _option(
        "threads",
        help="How many threads compute on the processors.",
        show_default="OMP_NUM_THREADS, or as many as are idle",
        callback=_threads,
        min=1,
        max=1024,
    ),
]
ContextTokens = Annotated[
    int | None,
    typer.Option(
        "--context-tokens",
        help="Tokens before a chunk in its document that it sees while it is prefilled, for ape, pced and the like.",
        show_default="0",
    ),
]
Debug = Annotated[
    bool, typer.Option("--debug", help="Log what happens and show tracebacks; may also be given after the command.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Print one JSON object per answer, each on one line.")]
NoServer = Annotated[
    bool,
    typer.Option(
        "--no-server",
        envvar="RAGKV_NO_SERVER",
        help="Do the work in this process, even if a server runs for the index (ragkv serve).",
    ),
]
Resident = Annotated[
    bool | None,
    typer.Option(
        "--resident/--no-resident",
        envvar=VARIABLES["resident"],
        help="In a terminal, keep the model loaded in the background for the questions of the next 5 minutes.",
        show_default="resident, where a person asks",
    ),
]
NoWait = Annotated[
    bool, typer.Option("--no-wait", help="Fail at once if another process writes to the index; the error names it.")
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print only results and errors.", callback=_without_warnings)
]

WorkFolder = Annotated[
    Path | None,
    typer.Option("--folder", callback=_folder, help="Measure on this disk.", show_default="the temporary folder"),
]
Documents = Annotated[
    list[str] | None,
    typer.Argument(
        help="Documents: ids, source names, paths, or patterns such as 'docs/*'.",
        metavar="DOCUMENT",
        show_default=False,
    ),
]
BlockTokens = Annotated[
    str | None,
    typer.Option(
        help="apb: tokens in a block, or in block, anchor and what a block passes on (4096,1024,512).",
        show_default="the paper's, for the document's length",
        metavar="TOKENS",
    ),
]
BatchTokens = Annotated[
    int | None,
    typer.Option(
        help="At most this many tokens go through the model in one step.",
        show_default="the index's, or by the available memory",
        rich_help_panel=RUNTIME,
        min=1,
    ),
]
MaxSequences = Annotated[
    int | None,
    typer.Option(
        help="At most this many sequences run at a time: one per question, or one per chunk (pced).",
        show_default="the index's, or by the available memory",
        rich_help_panel=RUNTIME,
        min=1,
    ),
]


def text_of(name: str, path: Path) -> str:
    """The text of an option's file; UsageError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"--{name} {path} cannot be read: {why}.") from error


_COMPLETIONS = {"engine": engines, "default_engine": engines, "engines": engine_lists, "codec": codecs}


def typer_option(field: OptionField, *, setting: str = "", default: Any = None) -> Any:
    """`typer.Option` for an option of a dataclass; its flag and variable are those of the setting, if there is one."""
    option = field.option
    setting = option.setting or setting
    flag = FLAGS.get(setting) or option.flag or (f"--{field.name.replace('_', '-')}" if default is False else "")
    choices = option.choices or (get_args(field.type) if get_origin(field.type) is Literal else ())

    def require(ctx: typer.Context, value: Any) -> Any:
        if value is not None and not ctx.resilient_parsing:
            field.require(value)
        return value

    return typer.Option(
        *([flag] if flag else []),
        envvar=VARIABLES.get(setting),
        help=option.help.removesuffix(".") + ("; may be given several times." if _repeats(field, setting) else "."),
        show_default=option.unset or default is not None,
        metavar="FILE" if option.in_file else option.metavar or None,
        rich_help_panel=option.panel or None,
        autocompletion=_COMPLETIONS.get(field.name) or (one_among(choices) if choices else None),
        callback=require if option.least is not None or option.choices else None,
    )


def _repeats(field: OptionField, setting: str) -> bool:
    """Whether the values of a list are given one by one; those of a setting are one word, with commas."""
    return field.is_list and not setting


Engine = Annotated[str | None, typer_option(question_options()["engine"])]
TopK = Annotated[int | None, typer_option(question_options()["top_k"])]
Retrieval = Annotated[str | None, typer_option(question_options()["retrieval"])]
Where = Annotated[list[str] | None, typer_option(question_options()["where"])]


@dataclass(frozen=True, slots=True, eq=False)
class OptionsOf:
    """Marks a command's parameter that is `build` of options of its own: those of `table`, or that `door` shows."""

    table: Mapping[str, OptionField]
    build: Callable[[Mapping[str, Any]], Any]
    door: str | None = None
    settings: bool = False
    """Whether they are settings of an index, with its flags and variables."""
    defaults: bool = False
    """Whether an option that is not given has the field's default, and not None."""

    def parameters(self) -> dict[str, inspect.Parameter]:
        parameters = {}
        for field in self.table.values() if self.door is None else at_door(self.table, self.door):
            setting = field.name if self.settings else ""
            kind: Any = field.type if field.type in (int, float, bool, Path) else str  # the owner checks other types
            kind = Path if field.option.in_file else list[str] if _repeats(field, setting) else kind
            default = field.default if self.defaults or field.name == "max_new_tokens" else None
            option = typer_option(field, setting=setting, default=default)
            parameters[field.name] = inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                annotation=Annotated[kind if default not in (None, ()) else kind | None, option],
                default=inspect.Parameter.empty if default is MISSING else default,
            )
        return parameters


def _question_arguments(typed: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `Question`; UsageError for a file that cannot be read."""
    options = question_options()
    read = {name: text_of(name, path) for name, path in typed.items() if options[name].option.in_file and path}
    values = {name: value for name, value in typed.items() if value not in (None, [])} | read
    if _LENGTH.fullmatch(values.get("thinking", "")):
        values["thinking"] = int(values["thinking"])
    return question_arguments(values)


def _index_settings(typed: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `IndexConfig` that are given."""
    return given_values(**{**typed, "engines": split_names(typed["engines"])})


QuestionArguments = Annotated[Mapping[str, Any], OptionsOf(question_options(), _question_arguments, "query")]
ChatArguments = Annotated[Mapping[str, Any], OptionsOf(question_options(), _question_arguments, "chat")]
RanksArguments = Annotated[Mapping[str, Any], OptionsOf(question_options(), _question_arguments, "ranks")]
_SETTINGS = options_of(IndexConfig)
Dtype = Annotated[str | None, typer_option(_SETTINGS["dtype"], setting="dtype")]
IngestSettings = Annotated[Mapping[str, Any], OptionsOf(_SETTINGS, _index_settings, "ingest", settings=True)]
PlanSettings = Annotated[Mapping[str, Any], OptionsOf(_SETTINGS, _index_settings, "plan", settings=True)]
ShownSettings = Annotated[Mapping[str, Any], OptionsOf(_SETTINGS, _index_settings, "show", settings=True)]


def shared_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`command` with the options of its parameters that are marked by `OptionsOf`, or of a dataclass's type."""
    signature = inspect.signature(command, eval_str=True)
    parameters: list[inspect.Parameter] = []
    taken: dict[str, tuple[OptionsOf, Sequence[str]]] = {}
    for parameter in signature.parameters.values():
        kind, *notes = get_args(parameter.annotation) or (parameter.annotation,)
        options = next((note for note in notes if isinstance(note, OptionsOf)), None)
        if is_dataclass(kind) and isinstance(kind, type):
            options = OptionsOf(options_of(kind), _by_keyword(kind), defaults=True)
        if options is None:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        else:
            own = options.parameters()
            parameters += own.values()
            taken[parameter.name] = options, [*own]

    @wraps(command)
    def run(**typed: Any) -> Any:
        for name, (options, names) in taken.items():
            typed[name] = options.build({option: typed.pop(option) for option in names})
        return command(**typed)

    # mypy does not allow an assignment to a function's signature
    vars(run)["__signature__"] = signature.replace(parameters=parameters)
    return run


def _by_keyword(kind: type) -> Callable[[Mapping[str, Any]], Any]:
    return lambda values: kind(**values)
