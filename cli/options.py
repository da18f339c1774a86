"""Options that several commands share, and where the value of a setting comes from.

The order is flag, environment variable, index, user file, default. Settings that an index was built with are in its
`ragkv.toml` and cannot be overridden: `ragkv ingest` refuses a flag or variable that contradicts them, and a question
may choose only the settings in `CHOSEN`. The user file holds defaults for new indexes, and the index and device to use
when nothing else names them. Only the command line reads variables and the user file; `RagKV` does not.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

import typer

from ragkv.cli.console import note_wait
from ragkv.config import (
    CONFIG_FILE,
    DTYPES,
    MODELS,
    MODES,
    EncodingConfig,
    IndexConfig,
    StepsConfig,
    build_config,
    config_in,
)
from ragkv.errors import ConfigError, KVMismatchError, ModelLoadError, UsageError
from ragkv.finetune.config import Setting
from ragkv.model.checkpoint import lasting
from ragkv.question import question_arguments, question_options
from ragkv.util.display import one_line
from ragkv.util.files import read_toml, shortened, user_folder
from ragkv.util.options import at_door


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


modes = one_among(MODES)


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


engine_lists, codec_lists, mode_lists = _listed(engines), _listed(codecs), _listed(modes)

Origin = Literal["flag", "environment", "index", "file", "default"]

USED = ("index", "device")
"""Further settings of the user file besides the fields of `IndexConfig`; they belong to the user, not to an index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedFolder:
    """A `[[watch]]` of the user file: a folder that `ragkv serve` follows for an index. It is not in `ragkv.toml`,
    because a foreign index could then read any of the user's files."""

    index: str = ""
    folder: str = ""
    prune: bool = False


VARIABLES: Mapping[str, str] = {
    "index": "RAGKV_INDEX",
    "device": "RAGKV_DEVICE",
    "model": "RAGKV_MODEL",
    "dtype": "RAGKV_DTYPE",
    "engines": "RAGKV_ENGINES",
    "chunk_tokens": "RAGKV_CHUNK_TOKENS",
    "codec": "RAGKV_CODEC",
    "embedder": "RAGKV_EMBEDDER",
    "reranker": "RAGKV_RERANKER",
    "default_engine": "RAGKV_ENGINE",
    "top_k": "RAGKV_TOP_K",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueInForce:
    """The effective value of a setting and its origin; `where` names the flag, the variable or the file."""

    name: str
    value: Any
    origin: Origin
    where: str = ""


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
            if key in USED and not (isinstance(value, str) and value.strip()):
                raise ConfigError(f"{path}: {key} = {shortened(value)} must be a string that is not empty.")
        settings = {key: value for key, value in table.items() if key not in USED}
        # some settings are only valid with an embedder; which one is not known yet, so name any
        checked = config_in(path, {"embedder": "mini"} | settings)
        if settings.keys() & _NAMES:  # an import of 0.15 s, half of what a question to a running server takes
            from ragkv.index.index import check_names

            check_names(checked, path)
        folders = [build_config(WatchedFolder, folder, f"{path} [[watch]]") for folder in watch]
        return cls(path=path, table=table, settings={key: getattr(checked, key) for key in settings}, watch=folders)


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its dotted name; tables and dataclasses become their fields."""
    for key, value in values.items():
        inner = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        if isinstance(inner, Mapping):
            yield from flatten(inner, f"{prefix}{key}.")
        else:
            yield prefix + key, tuple(value) if isinstance(value, list) else value


def in_force(
    *,
    flags: Mapping[str, Any],
    variables: Mapping[str, Any],
    user: UserFile,
    config: IndexConfig,
    used: Mapping[str, Any],
    index: tuple[Path, Mapping[str, Any]] | None,
) -> list[ValueInForce]:
    """Every setting with its origin.

    `flags` and `variables` are the given values by name. `index` is the path and the table of a `ragkv.toml`, and
    `config` its configuration; without an index, `config` is that of a new one. `used` holds the defaults of `USED`.
    A variable only overrides an index in settings that a question may choose (`CHOSEN`).
    """
    path, written = index or (Path(), {})
    in_index, in_file = dict(flatten(written)), dict(flatten(user.table))
    whole = {**used, **dict(flatten({f.name: getattr(config, f.name) for f in fields(config)}))}
    values = []
    for name, value in whole.items():
        if name in flags:
            values.append(ValueInForce(name=name, value=flags[name], origin="flag", where=FLAGS[name]))
        elif name in variables and (index is None or name in CHOSEN):
            values.append(ValueInForce(name=name, value=variables[name], origin="environment", where=VARIABLES[name]))
        elif name in in_index:
            values.append(ValueInForce(name=name, value=value, origin="index", where=str(path)))
        elif name in in_file and (index is None or name in USED):
            value = in_file[name] if name in USED else value
            values.append(ValueInForce(name=name, value=value, origin="file", where=str(user.path)))
        else:
            values.append(ValueInForce(name=name, value=value, origin="default"))
    return values


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
    if value is None:
        value = UserFile.read(user_file()).table.get("device")
    if value is not None and value.strip().startswith("cuda"):
        _require_cuda(value)
    return value


def _without_warnings(ctx: typer.Context, value: bool) -> bool:
    """Log errors only; a server's log keeps its warnings, and with `--debug` everything is logged."""
    log = logging.getLogger()
    if value and not ctx.resilient_parsing and ctx.info_name not in ("serve", "mcp") and log.level == logging.WARNING:
        log.setLevel(logging.ERROR)
    return value


def _require_cuda(name: str) -> None:
    """ModelLoadError for a GPU that torch or the machine does not support, without importing torch."""
    import ctypes
    import runpy

    spec = find_spec("torch")
    origin = None if spec is None else spec.origin
    version = {} if origin is None else runpy.run_path(str(Path(origin).with_name("version.py")))
    if version.get("hip"):  # AMD's GPUs are called cuda, too
        return
    missing = "the torch that is installed is built without CUDA" if version.get("cuda") is None else None
    if missing is None and sys.platform == "linux":
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            missing = "this machine has no driver of NVIDIA"
    if missing is not None:
        raise ModelLoadError(f"Device {name!r} is not available: {missing}; leave --device out to use the CPU.")


def _fitting(ctx: typer.Context, param: typer.CallbackParam, value: Any) -> Any:
    """Refuse a wrong value before anything is loaded."""
    if value is not None and not ctx.resilient_parsing:
        options = question_options()
        name = next(each for each in options if param.name in (each, options[each].option.setting))
        options[name].require(value)
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
Model = Annotated[
    str | None,
    _option(
        "model",
        help="Model folder, .gguf file or hub id; `smollm2` is SmolLM2-135M, tuned to answer from passages "
        "(make smollm2), `mini` the bundled one for the examples.",
        show_default="smollm2 if it is installed, mini for the examples",
    ),
]
Dtype = Annotated[
    str | None,
    _option(
        "dtype",
        help="auto, float32, bfloat16, float16 or int8 (weights; a processor).",
        show_default="auto",
        autocompletion=one_among(DTYPES),
    ),
]
Engines = Annotated[
    str | None,
    _option(
        "engines",
        help="Engines to store KV for.",
        show_default="ape,block,pced",
        autocompletion=engine_lists,
    ),
]
ChunkTokens = Annotated[
    int | None,
    _option(
        "chunk_tokens",
        help="Most tokens of a chunk, as the model counts them.",
        show_default="the model's, or 256",
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
Codec = Annotated[
    str | None,
    _option(
        "codec",
        help="How KV is stored: half (16 bits), raw, zstd (lossless), q8 (8 bits in memory too), int8, int4.",
        show_default="half",
        autocompletion=codecs,
    ),
]
KV = Annotated[
    str | None,
    typer.Option(
        "--kv",
        help="When a chunk's KV is made: all at ingest, or on-demand, when a question first reads it.",
        show_default="all",
        autocompletion=one_among(["all", "on-demand"]),
    ),
]
KVBudget = Annotated[
    str | None,
    typer.Option(
        "--kv-budget",
        help="The most KV that is kept, as in 200GB or none: the KV that saves the least time is evicted first.",
        show_default="none",
    ),
]
Embedder = Annotated[
    str | None,
    _option(
        "embedder",
        help="Embedding model: `mini`, a folder, a hub id (BAAI/bge-m3), or `none` to search by words only.",
        show_default="mini for the mini model, else none",
    ),
]
Reranker = Annotated[
    str | None,
    _option(
        "reranker",
        help="Cross-encoder that sorts the results: `mini`, a folder, a hub id (BAAI/bge-reranker-v2-m3), or `none`.",
        show_default="mini for the mini embedder, else none",
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
MaxRows = Annotated[
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


_COMPLETIONS = {"engine": engines, "retrieval": modes}


def question_option(name: str) -> Any:
    """`typer.Option` for an option of a question (`ragkv.question`)."""
    field = question_options()[name]
    option = field.option
    flag = FLAGS[option.setting] if option.setting else option.flag
    several = "; may be given several times." if field.is_list else "."
    return typer.Option(
        *([flag] if flag else []),
        envvar=VARIABLES.get(option.setting),
        help=option.help.removesuffix(".") + several,
        show_default=option.unset or (name == "max_new_tokens"),
        metavar="FILE" if option.in_file else option.metavar or None,
        rich_help_panel=option.panel or None,
        autocompletion=_COMPLETIONS.get(name),
        callback=_fitting if option.least is not None or option.choices else None,
    )


Engine = Annotated[str | None, question_option("engine")]
TopK = Annotated[int | None, question_option("top_k")]
Retrieval = Annotated[str | None, question_option("retrieval")]
Where = Annotated[list[str] | None, question_option("where")]


@dataclass(frozen=True, slots=True)
class QuestionDoor:
    """Marks a command's parameter that gets the options which `door` shows, as arguments of `Question`."""

    door: str

    def parameters(self) -> dict[str, inspect.Parameter]:
        """The command's options, by the names of the question's."""
        parameters = {}
        for field in at_door(question_options(), self.door):
            kind: Any = str if get_origin(field.type) else field.type
            kind = Path if field.option.in_file else list[str] if field.is_list else kind
            default = field.default if field.name == "max_new_tokens" else None
            annotation = Annotated[kind | None, question_option(field.name)]
            parameters[field.name] = inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
            )
        return parameters

    def arguments(self, typed: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of `Question`; UsageError for a file that cannot be read."""
        options = question_options()
        read = {name: text_of(name, path) for name, path in typed.items() if options[name].option.in_file and path}
        values = {name: value for name, value in typed.items() if value not in (None, [])} | read
        if _LENGTH.fullmatch(values.get("thinking", "")):
            values["thinking"] = int(values["thinking"])
        return question_arguments(values)


QuestionArguments = Annotated[Mapping[str, Any], QuestionDoor("query")]
ChatArguments = Annotated[Mapping[str, Any], QuestionDoor("chat")]


def shared_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`command` with an option for each field of the dataclasses that it takes, and such objects made of their values.

    A field is an option if it is annotated with typer's `Option`, or with a `Setting`; others keep their defaults. A
    parameter with a `QuestionDoor` has an option for each of a question's.
    """
    signature = inspect.signature(command, eval_str=True)
    parameters: list[inspect.Parameter] = []
    taken: dict[str, tuple[Callable[..., Any], Sequence[str]]] = {}
    for parameter in signature.parameters.values():
        kind, *notes = get_args(parameter.annotation) or (parameter.annotation,)
        if notes and isinstance(notes[0], QuestionDoor):
            options = notes[0].parameters()
            taken[parameter.name] = _by_keyword(notes[0].arguments), [*options]
        elif is_dataclass(kind) and isinstance(kind, type):
            options = _options_of(kind)
            taken[parameter.name] = kind, [*options]
        else:
            options = {parameter.name: parameter}
        parameters += options.values()

    @wraps(command)
    def run(**typed: Any) -> Any:
        for name, (build, names) in taken.items():
            typed[name] = build(**{option: typed.pop(option) for option in names})
        return command(**typed)

    # mypy does not allow an assignment to a function's signature
    keywords = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    vars(run)["__signature__"] = signature.replace(parameters=keywords)
    return run


def _by_keyword(build: Callable[[Mapping[str, Any]], Any]) -> Callable[..., Any]:
    return lambda **values: build(values)


def _options_of(kind: type) -> dict[str, inspect.Parameter]:
    """The parameters of a dataclass that are options. The dataclass checks the values, so choices are texts here."""
    parameters = {}
    for name, parameter in inspect.signature(kind, eval_str=True).parameters.items():
        value, *notes = get_args(parameter.annotation) if get_origin(parameter.annotation) is Annotated else (None,)
        setting = next((note for note in notes if isinstance(note, Setting)), None)
        if setting is not None:
            flag = f"--{name.replace('_', '-')}"
            words = [setting.option or flag] if setting.option or parameter.default is False else []
            default: Any = setting.default or parameter.default is not None
            option = typer.Option(*words, help=setting.about, show_default=default)
            value = str if get_origin(value) is Literal else value
            parameter = parameter.replace(annotation=Annotated[value, option])
        if notes:
            parameters[name] = parameter
    return parameters
