"""The configuration of an index, stored in its `ragkv.toml`. It is validated when read; unknown keys are refused."""

from __future__ import annotations

import functools
import logging
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from ragkv.decoding import Decoding
from ragkv.errors import ConfigError, StoreError
from ragkv.util.files import (
    FULL,
    dump_toml,
    edit_toml,
    overwrite_plain,
    parse_toml,
    plain,
    read_text,
    read_toml,
    refusal,
    require_plain,
    shortened,
    write_plain,
)
from ragkv.util.options import Option

logger = logging.getLogger(__name__)
CONFIG_FILE = "ragkv.toml"
NEW_CONFIG_FILE = f"{CONFIG_FILE}.new"
_HEAD = "# What this index was built with. `ragkv query` reads it, so it needs no model flags.\n\n"
Mode = Literal["dense", "sparse", "colbert", "hybrid", "bm25"]
MODES: tuple[Mode, ...] = typing.get_args(Mode)
"""Modes of retrieval. Which is best depends on the documents (docs/retrieval.md)."""
Fusion = Literal["relative", "rrf"]
"""How hybrid merges its two rankings: by scores scaled to the range of each, or by reciprocal ranks."""
History = Literal["auto", "prompt", "search", "none"]
HISTORY: tuple[History, ...] = typing.get_args(History)
"""How a conversation's earlier turns are used (docs/settings.md)."""
MOST_STEPS = 8
"""The most searches for one question."""
Count = Annotated[int, Meta(ge=1)]
_Limit = Annotated[Count | Literal["auto"], Meta(description='a number from 1 up, or "auto"')]
VECTORS = ("dense", "sparse", "colbert")
_INGEST = frozenset({"ingest", "show"})
_PLAN = _INGEST | {"plan"}
ModelDType = Literal["auto", "float32", "bfloat16", "float16", "int8"]
DTYPES: tuple[ModelDType, ...] = typing.get_args(ModelDType)
NEEDED: Mapping[Mode, tuple[str, ...]] = types.MappingProxyType(
    {"dense": ("dense",), "sparse": ("sparse",), "colbert": ("dense", "colbert"), "hybrid": ("dense",), "bm25": ()}
)
"""The kinds of vectors that a mode needs."""
TRANSFORMERS, LLAMA_CPP, VLLM = "transformers", "llama-cpp", "vllm"
"""The runtimes (docs/llama-cpp.md, docs/vllm.md)."""
NONE = "none"
"""The embedder of an index without vectors, and the reranker of one without a reranker."""
MODELS = ("model", "embedder", "reranker")
"""The settings that name a checkpoint: a folder, a hub id, or a bundled one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptConfig:
    """The text around the documents; `question` must hold `{question}` once.

    `prefix_newlines` lengthens the shared prefix by that many newline tokens before the documents (APE §4.1). If
    `system` and `context` are empty and the model has no chat template, the prefix is the BOS token alone. `bos` "none"
    leaves that token out too, even if the chat template writes it; "auto" follows the tokenizer and the template.
    """

    system: str = "Answer the question from the documents, in one or two sentences."
    context: str = "Documents:\n\n"
    question: str = "Question: {question}"
    separator: str = "\n\n"
    prefix_newlines: Annotated[int, Meta(ge=0, le=1000)] = 0
    bos: Literal["auto", "none"] = "auto"

    def __post_init__(self) -> None:
        require_types(self, "prompt.")
        if self.question.count("{question}") != 1:
            raise ConfigError("prompt.question must hold {question} exactly once.")

    def facts(self) -> dict[str, Any]:
        """All settings, to be hashed."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingConfig:
    """How many tokens before it in its document a chunk sees (docs/ingest.md, "Chunks that saw their document")."""

    context: Annotated[int, Meta(ge=0, le=65536)] = 0

    def __post_init__(self) -> None:
        require_types(self, "encoding.")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsConfig:
    """Search queries that the model writes (docs/retrieval.md, "Several steps" and "Follow-up questions")."""

    count: Annotated[int, Meta(ge=1, le=MOST_STEPS)] = 1
    prompt: Annotated[str, Meta(pattern=r"\{question\}", description="a text with {question}")] = "{question}"
    query: Annotated[str, Meta(pattern=r"\{written\}", description="a text with {written}")] = "{question} {written}"
    enough: str = ""
    max_new_tokens: Annotated[int, Meta(ge=1, le=1024)] = 48
    rewrite: bool = False
    rewrite_prompt: Annotated[
        str,
        Meta(pattern=r"(?s)(?=.*\{history\})(?=.*\{question\})", description="a text with {history} and {question}"),
    ] = "{history}\n\nWrite the last question so that it can be understood alone. Last question: {question}"

    def __post_init__(self) -> None:
        require_types(self, "steps.")


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestConfig:
    """Limits for one document, which is skipped with the reason if it is beyond them, and the ingest's own memory
    (docs/ingest.md, "Limits")."""

    max_file: int | str = "512MiB"
    max_characters: Count = 16_000_000
    max_memory: int | str = "1GiB"
    max_seconds: Count = 60
    ocr: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9_]+(\+[A-Za-z0-9_]+)*\Z",
            description='"auto", "none", or languages of tesseract, as in "eng+deu"',
        ),
    ] = "auto"
    memory: int | str = "1GiB"

    def __post_init__(self) -> None:
        require_types(self, "ingest.")
        if byte_count("ingest.max_file", self.max_file) < 1:
            raise ConfigError("ingest.max_file must be at least 1.")
        for name in ("max_memory", "memory"):
            if byte_count(f"ingest.{name}", getattr(self, name)) < 64 << 20:
                raise ConfigError(f"ingest.{name} must be at least 64MiB.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """How many questions are answered at a time (docs/questions.md); "auto" is chosen by the available memory."""

    batch_tokens: _Limit = "auto"
    max_sequences: _Limit = "auto"

    def __post_init__(self) -> None:
        require_types(self, "runtime.")

    @property
    def given(self) -> dict[str, int]:
        """The limits that are set."""
        return {name: value for name, value in asdict(self).items() if isinstance(value, int)}

    def overridden(self, by: RuntimeConfig) -> RuntimeConfig:
        """These limits, replaced by those that `by` sets."""
        return replace(self, **by.given)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """A store of KV that several machines share (docs/tiers.md); `timeout` and `ttl` are seconds."""

    url: str
    namespace: Annotated[
        str, Meta(pattern=r"^[a-z0-9-]{1,64}\Z", description="1 to 64 lower-case letters, digits or hyphens")
    ] = "shared"
    secret: str = ""
    timeout: Annotated[float, Meta(ge=0.001, le=60)] = 0.25
    ttl: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] = 0

    def __post_init__(self) -> None:
        require_types(self, "tiers.")
        scheme, slashes, rest = self.url.partition("://")
        one_of("tiers.url", scheme, ("redis", "rediss", "unix", "s3", "gs", "az", "file", "memory"))
        if not slashes or (scheme == "file" and not rest.startswith("/")):
            raise ConfigError(
                f"tiers.url = {shortened(self.url)} must be a URL as in redis://HOST:6379 or file:///FOLDER."
            )
        _require_address("tiers.url", self.url)
        if not re.fullmatch(r"\w{0,64}", self.secret, re.ASCII):
            raise ConfigError("tiers.secret must be the name of an environment variable.")


@dataclass(frozen=True, slots=True, kw_only=True)
class QdrantConfig:
    """The Qdrant that searches an index's vectors in place of FAISS (docs/retrieval.md, "Qdrant"); no `url`: FAISS."""

    url: str = ""
    collection: Annotated[
        str, Meta(pattern=r"^[A-Za-z0-9_-]{0,200}\Z", description="letters, digits, hyphens and underscores")
    ] = ""
    api_key: str = ""
    timeout: Annotated[int, Meta(ge=1, le=600)] = 10

    def __post_init__(self) -> None:
        require_types(self, "qdrant.")
        if not re.fullmatch(r"|https?://[^/@\s]+(/[^@\s]*)?|memory://\w*", self.url, re.ASCII):
            raise ConfigError(
                f"qdrant.url = {shortened(self.url)} must be a URL as in http://HOST:6333, without a user or password."
            )
        _require_address("qdrant.url", self.url)
        if not re.fullmatch(r"\w{0,64}", self.api_key, re.ASCII):
            raise ConfigError("qdrant.api_key must be the name of an environment variable.")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """Everything that `query` needs to know about an index (docs/design.md).

    `chunk_tokens` includes the separator after the chunk. An engine that is not among `engines` works too, and encodes
    what is missing. `tuning` holds one table per engine, which the engine's own `Config` checks. `kv_budget` and
    `memory_budget` are bytes, or as in "200GB": the KV that is kept on the disk ("none": all of it, docs/budget.md),
    and in a process's memory between queries ("auto", or 0 for none, docs/formats.md).

    `vectors` are the kinds of the embedder's vectors that are stored, which `retrieval` has to find there; `fusion` is
    how hybrid merges its rankings. `rerank` says whether the reranker judges the best `candidates`. `index_factory` is
    FAISS's factory string for dense vectors (docs/retrieval.md). `history` says what a conversation's earlier turns are
    used for: the prompt and the search, the search alone, or nothing; "auto" follows what is known of the model
    (docs/settings.md).
    """

    model: Annotated[
        str,
        Option(
            "Model folder, .gguf file or hub id; `smollm2` is SmolLM2-135M, tuned to answer from passages "
            "(make smollm2), `mini` the bundled one for the examples.",
            unset="smollm2 if it is installed, mini for the examples",
            doors=_PLAN,
        ),
    ] = "mini"
    dtype: Annotated[
        ModelDType,
        Option("auto, float32, bfloat16, float16 or int8 (weights; a processor).", unset="auto", doors=_PLAN),
    ] = "auto"
    executor: Annotated[
        Literal["transformers", "llama-cpp", "vllm"],
        Option(
            "What runs the model: transformers, llama-cpp (.gguf files at their own size, and smollm2), or vllm URL.",
            unset="llama-cpp for a .gguf file and smollm2 where llama-cpp-python is installed",
            flag="--runtime",
            doors=_INGEST,
        ),
    ] = "transformers"
    engines: Annotated[tuple[str, ...], Option("Engines to store KV for.", unset="ape,block,pced", doors=_PLAN)] = (
        "ape",
        "block",
        "pced",
    )
    chunk_tokens: Annotated[
        int,
        Meta(ge=8, le=65536),
        Option("Most tokens of a chunk, as the model counts them.", unset="the model's, or 256", doors=_PLAN),
    ] = 256
    codec: Annotated[
        str,
        Option(
            "How KV is stored: half (16 bits), raw, zstd (lossless), q8 (8 bits in memory too), int8, int4.",
            unset="half",
            doors=_PLAN,
        ),
    ] = "half"
    kv: Annotated[
        Literal["all", "on-demand"],
        Option(
            "When a chunk's KV is made: all at ingest, or on-demand, when a question first reads it.",
            unset="all",
            doors=frozenset({"ingest"}),
        ),
    ] = "all"
    kv_budget: Annotated[
        int | str,
        Option(
            "The most KV that is kept, as in 200GB or none: the KV that saves the least time is evicted first.",
            unset="none",
            doors=frozenset({"ingest"}),
        ),
    ] = NONE
    embedder: Annotated[
        str,
        Option(
            "Embedding model: `minilm` (English; make smollm2), `mini`, a folder, a hub id (BAAI/bge-m3), or `none` to "
            "search by words only.",
            unset="mini for the mini model, else minilm if it is installed",
            doors=_PLAN,
        ),
    ] = NONE
    reranker: Annotated[
        str,
        Option(
            "Cross-encoder that sorts the results: `mini`, a folder, a hub id (BAAI/bge-reranker-v2-m3), or `none`.",
            unset="mini for the mini embedder, else none",
            doors=_INGEST,
        ),
    ] = NONE
    retrieval: Annotated[
        Mode,
        Option(
            "How questions search: dense, sparse, colbert, hybrid or bm25.",
            unset="hybrid with an embedder other than mini, else bm25",
            doors=frozenset({"ingest"}),
        ),
    ] = "bm25"
    default_engine: Annotated[
        str, Option("The engine that answers.", unset="ape, or the model's", doors=frozenset({"show"}))
    ] = "full"
    top_k: Annotated[
        Count, Option("How many chunks a question reads.", unset="8, or the model's", doors=frozenset({"plan", "show"}))
    ] = 8
    rerank: bool = True
    vectors: tuple[str, ...] = VECTORS
    fusion: Fusion = "relative"
    candidates: Count = 32
    history: History = "auto"
    index_factory: str = "IDMap2,Flat"
    memory_budget: int | str = "auto"
    prompt: PromptConfig = field(default_factory=PromptConfig)
    encoding: EncodingConfig = field(default_factory=EncodingConfig)
    decoding: Decoding = field(default_factory=Decoding)
    steps: StepsConfig = field(default_factory=StepsConfig)
    ingest: IngestConfig = field(default_factory=IngestConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    tiers: tuple[TierConfig, ...] = ()
    qdrant: QdrantConfig = field(default_factory=QdrantConfig)
    tuning: Mapping[str, Mapping[Any, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lists = {
            name: value for name in ("engines", "vectors", "tiers") if isinstance(value := getattr(self, name), list)
        }
        for name, value in build_tables(IndexConfig, lists).items():
            object.__setattr__(self, name, value)
        require_types(self)
        object.__setattr__(self, "tuning", plain("tuning", self.tuning))
        plain("decoding", {key: value for key, value in asdict(self.decoding).items() if value is not None})
        for kind in self.vectors:
            one_of("vectors", kind, VECTORS)
        if self.retrieval != "bm25" and self.embedder == NONE:
            raise ConfigError(
                f'retrieval = "{self.retrieval}" needs an embedder; set embedder ("mini", a folder or a hub id), or '
                'retrieval = "bm25".'
            )
        if missing := [kind for kind in NEEDED[self.retrieval] if kind not in self.vectors]:
            can = ", ".join(mode for mode in MODES if set(NEEDED[mode]) <= set(self.vectors))
            raise ConfigError(
                f'retrieval = "{self.retrieval}" needs {" and ".join(missing)} vectors, which are not among vectors = '
                f"{list(self.vectors)}; with these, retrieval can be {can}."
            )
        if self.memory_budget != "auto":
            byte_count("memory_budget", self.memory_budget)
        if self.kv_budget != NONE:
            byte_count("kv_budget", self.kv_budget)

    @property
    def budget(self) -> int | None:
        """The bytes of `kv_budget`; None without a limit."""
        return None if self.kv_budget == NONE else byte_count("kv_budget", self.kv_budget)

    def to_toml(self) -> str:
        """The text of `ragkv.toml`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        tables: dict[str, Any] = {"prompt": asdict(values.pop("prompt"))}
        names = ("encoding", "decoding", "steps", "ingest", "runtime", "qdrant")
        tables |= {name: _set(values.pop(name)) for name in names}
        tables["tuning"] = values.pop("tuning")
        tables["tiers"] = [{"url": tier.url, **_set(tier, url=tier.url)} for tier in values.pop("tiers")]
        return _HEAD + dump_toml(values | {name: table for name, table in tables.items() if table})

    @classmethod
    def from_toml(cls, text: str, *, source: str = CONFIG_FILE) -> Self:
        """Read `ragkv.toml`; unknown keys and wrong types are a ConfigError that names them."""
        config: Self = build_config(cls, parse_toml(text, source=source), source)
        return config


def _set(settings: Any, **needed: Any) -> dict[str, Any]:
    """The settings that differ from the defaults. The others are left out, because TOML has no None."""
    usual = asdict(type(settings)(**needed))
    return {key: value for key, value in asdict(settings).items() if value != usual[key]}


_hints: Callable[[Any], dict[str, Any]] = functools.cache(functools.partial(typing.get_type_hints, include_extras=True))
"""Evaluating a class's annotations takes longer than reading the file."""


def build_tables(cls: type[Any], values: Mapping[str, Any], source: str = "") -> dict[str, Any]:
    """The values of `cls`: its tables, and its lists of tables, are built; other lists become tuples."""
    built: dict[str, Any] = {}
    for key, value in values.items():
        hint, where = _hints(cls).get(key), f"{source} [{key}]" if source else key
        inner = next(iter(typing.get_args(hint)), None)
        if is_dataclass(hint) and isinstance(value, dict):
            value = build_config(typing.cast("type[Any]", hint), value, where)
        elif isinstance(value, list):
            table = typing.cast("type[Any]", inner) if is_dataclass(inner) else None
            value = tuple(
                build_config(table, each, where) if table and isinstance(each, dict) else each for each in value
            )
        built[key] = value
    return built


def build_config(cls: type[Any], values: Mapping[str, Any], source: str) -> Any:
    """A config dataclass from a table of plain values; `source` names the table in errors."""
    known = {f.name for f in fields(cls)}
    if unknown := next((key for key in values if key not in known), None):
        raise ConfigError(f"{source}: unknown key {unknown!r}; known are {', '.join(sorted(known))}.")
    built = build_tables(cls, values, source)
    require_types(cls, f"{source}: ", built)
    try:
        return cls(**built)
    except TypeError as error:  # a setting without a default is missing
        raise ConfigError(f"{source}: {str(error).partition(' ')[2]}.") from error


def require_types(config: Any, prefix: str = "", values: Mapping[str, Any] | None = None) -> None:
    """ConfigError unless the values of a config (or `values`, for a class) have the types, bounds and choices."""
    for name, hint in _hints(config if isinstance(config, type) else type(config)).items():
        if values is not None and name not in values:
            continue
        value = getattr(config, name) if values is None else values[name]
        if wanted := _refusal(value, hint):
            shown = shortened(list(value) if isinstance(value, tuple) else value)
            raise ConfigError(f"{prefix}{name} must be {wanted}, not {shown}.", param=name)
        if not (value is None or is_dataclass(hint) or isinstance(value, Path)):
            plain(prefix + name, [tier.url for tier in value] if name == "tiers" else value)


def _refusal(value: Any, hint: Any) -> str:
    """What a value must be that does not fit a type, its bounds (`Meta`) or its choices (`Literal`); else empty."""
    if isinstance(hint, type) and is_dataclass(hint):
        return "" if isinstance(value, hint) else "a table"
    try:
        msgspec.convert(value, hint)
    except UnicodeEncodeError:  # half of a surrogate pair, which `plain` names
        return ""
    except msgspec.ValidationError:
        kind, *notes = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
        bounds = next((note for note in notes if isinstance(note, Meta)), None)
        if bounds is not None and bounds.description:
            return bounds.description
        if bounds is None or _refusal(value, kind):
            return _kind(kind)
        return f"at least {bounds.ge}" if bounds.le is None else f"from {bounds.ge} to {bounds.le}"
    return ""


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
_KINDS |= {tuple[str, ...]: "a list of strings", tuple[int, ...]: "a list of whole numbers"}


def _kind(hint: Any) -> str:
    """What a value of the type is called in a message."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(inner)}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_kind(each) for each in inner if each is not type(None))
    return _KINDS.get(hint, "a list of tables" if origin is tuple else "a table")


def byte_count(name: str, value: int | str) -> int:
    """The bytes of 4096, "4096", "512MiB", "1.5 GiB" or "2kB", in small or capital letters; else `ConfigError`."""
    match = re.fullmatch(r"(\d+(?:\.\d+(?= *[KMGT]))?) *(|[KMGT]I?B)", str(value).strip().upper(), re.ASCII)
    if isinstance(value, bool) or match is None:
        raise ConfigError(f'{name} must be a number of bytes, as in 0, 536870912 or "512MiB", not {value!r}.')
    step = 1024 if "I" in match[2] else 1000
    times = step ** " KMGT".index(match[2][:1] or " ")
    whole = match[1].isdecimal() and len(match[1]) < 20  # a float would round numbers of more than 53 bits
    count = int(match[1]) * times if whole else float(match[1]) * times
    if count >= 1 << 63:  # also infinity, from a number of hundreds of digits
        raise ConfigError(f"{name} is a number of bytes beyond 64 bits; give a smaller one.")
    return int(count)


def _require_address(name: str, url: str) -> None:
    """ConfigError for a URL whose host or port is none. It is not shown, because it may have a password."""
    try:
        urlsplit(url).port  # noqa: B018 - the host and the port are read here
    except ValueError:
        raise ConfigError(f"{name} must have a host and a port as in HOST:6379 or [::1]:6379.") from None


def one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """ConfigError, which names the choices, for any other value."""
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {value!r}.")


def load_config(folder: Path) -> IndexConfig:
    """The configuration of the index at `folder`."""
    path = folder / CONFIG_FILE
    try:
        require_plain(path)
        table = read_toml(path)
    except FileNotFoundError:
        raise ConfigError(f"There is no index at {folder}; make one with: ragkv ingest PATH --index {folder}") from None
    except NotADirectoryError as error:
        raise ConfigError(
            f"An index is a folder, and {folder} is a file or below one; name another --index."
        ) from error
    except OSError as error:  # a link, a pipe
        raise ConfigError(f"{path} cannot be read: {refusal(error)}.") from error
    return config_in(path, table)


def config_in(path: Path, values: Mapping[str, Any]) -> IndexConfig:
    """The configuration in a file; ConfigError names the file."""
    try:
        config: IndexConfig = build_config(IndexConfig, values, str(path))
    except ConfigError as error:
        raise ConfigError(str(error) if str(path) in str(error) else f"{path}: {error}") from error
    return config


def save_config(folder: Path, config: IndexConfig) -> None:
    """Replace the index's configuration atomically, so that a reader sees the old file or the new one.

    Hold the folder's lock (`locked`) if other processes may do the same, from the reading of what is changed.
    An existing file is edited: unchanged settings keep their place and form, and all comments stay. On a full disk the
    file is overwritten in place, because a smaller KV budget may be what frees the disk.
    """
    content = (_edited(folder, config) or config.to_toml()).encode()
    try:
        fresh = folder / NEW_CONFIG_FILE
        try:
            write_plain(fresh, content)
            fresh.replace(folder / CONFIG_FILE)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            if error.errno not in FULL or not require_plain(folder / CONFIG_FILE):
                raise
            overwrite_plain(folder / CONFIG_FILE, content)
    except OSError as error:
        raise StoreError(
            f"{folder / CONFIG_FILE} cannot be written ({refusal(error)}); make the index writable."
        ) from error


def _edited(folder: Path, config: IndexConfig) -> str | None:
    """The index's `ragkv.toml`, edited so that it reads as `config`; None if there is no file to edit."""
    path, wanted = folder / CONFIG_FILE, config.to_toml()
    try:
        require_plain(path)
        text = read_text(path)
        now = IndexConfig.from_toml(text).to_toml()
        edited = edit_toml(text, parse_toml(now, source=CONFIG_FILE), parse_toml(wanted, source=CONFIG_FILE))
        if IndexConfig.from_toml(edited).to_toml() == wanted:
            return edited
        why = "the edited file would have other values"
    except FileNotFoundError:
        return None
    except (ConfigError, OSError, ValueError) as error:
        why = str(error)
    logger.warning("%s is rewritten without its comments: %s", path, why)
    return None
