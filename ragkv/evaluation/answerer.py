"""What is compared: a model with an engine, its settings, a codec, and a way of ranking chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any

from ragkv.config import MODES, PromptConfig, build_config
from ragkv.engines import Engine, engine_class
from ragkv.errors import ConfigError, UsageError
from ragkv.evaluation.spec import Spec
from ragkv.model.checkpoint import MINI, resolve
from ragkv.store import codec_from_config

__all__ = ["GIVEN", "RAW", "Contender", "contenders"]

GIVEN = "given"
"""Chunks in the order of the task and all equally relevant, without a retriever."""

RAW = "raw"
_PROMPT = "prompt."


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way of answering: everything that an answer depends on besides the question and its chunks.

    `retrieval` is a mode of `ragkv.index.search`, or `given`; the best `top_k` chunks are read (None: all). `dtype`
    None means float32 for the mini model on a CPU, and the checkpoint's own otherwise. `name` is a label for tables, if
    engine and options are not enough. The codec of an engine without stored KV is always raw.
    """

    engine: str
    options: Mapping[str, Any] = field(default_factory=dict)
    model: str = MINI
    dtype: str | None = None
    codec: str = RAW
    retrieval: str = GIVEN
    rerank: bool = False
    top_k: int | None = None
    prompt: PromptConfig = field(default_factory=PromptConfig)
    name: str = ""

    def __post_init__(self) -> None:
        made = self.make()
        codec_from_config({"id": self.codec})
        if made.encoding is None:
            object.__setattr__(self, "codec", RAW)
        if self.retrieval not in (GIVEN, *MODES):
            raise UsageError(f"--retrieval must be of {GIVEN}, {', '.join(MODES)}, not {self.retrieval!r}.")
        if self.retrieval == GIVEN and (self.rerank or self.top_k is not None):
            raise UsageError(
                f"--rerank and --top-k choose among chunks that were scored; give --retrieval {'|'.join(MODES)}."
            )
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"--top-k must be at least 1, not {self.top_k}.")

    @property
    def label(self) -> str:
        """The name in tables: `name`, or the engine with its options."""
        return self.name or str(Spec(self.engine, self.options))

    @property
    def scoring(self) -> str:
        """The way its chunks are ranked, in a word."""
        return f"{self.retrieval}+rerank" if self.rerank else self.retrieval

    def make(self) -> Engine:
        """A new engine. Raises UsageError if it is unknown, and ConfigError for options that it does not have."""
        kind = engine_class(self.engine)
        try:
            return kind(build_config(kind.Config, dict(self.options), f"engine {self.engine}"))
        except TypeError as error:
            raise ConfigError(f"engine {self.engine}: the options do not fit: {error}.") from error


def contenders(
    engines: Iterable[Spec],
    *,
    models: Sequence[str] = (MINI,),
    codecs: Sequence[str] = (RAW,),
    retrievals: Sequence[str] = (GIVEN,),
    rerank: Sequence[bool] = (False,),
    top_k: int | None = None,
    dtype: str | None = None,
    prompt: PromptConfig | None = None,
    tuning: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Contender]:
    """Every combination of the arguments, once each. An option of a spec overrides one of `tuning`.

    Without `prompt`, a checkpoint that was tuned without a BOS is asked without one. Options that begin with `prompt.`
    set fields of `PromptConfig`: `ape(prompt.prefix_newlines=20)`.
    """
    found: list[Contender] = []
    for model, spec, codec, retrieval, reranked in product(models, engines, codecs, retrievals, rerank):
        words, options = _split(spec)
        one = Contender(
            engine=spec.name,
            options={**(tuning or {}).get(spec.name, {}), **options},
            model=model,
            dtype=dtype,
            codec=codec,
            retrieval=retrieval,
            rerank=reranked,
            top_k=top_k,
            prompt=_worded(prompt or resolve(model).tuned_words(PromptConfig()), words, spec),
            name=str(spec) if words else "",
        )
        if one not in found:
            found.append(one)
    return found


def _split(spec: Spec) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a spec's options into those of the prompt and those of the engine."""
    words = {key.removeprefix(_PROMPT): value for key, value in spec.options.items() if key.startswith(_PROMPT)}
    return words, {key: value for key, value in spec.options.items() if not key.startswith(_PROMPT)}


def _worded(prompt: PromptConfig, words: Mapping[str, Any], spec: Spec) -> PromptConfig:
    values = {f.name: getattr(prompt, f.name) for f in fields(prompt)} | dict(words)
    built: PromptConfig = build_config(PromptConfig, values, f"{spec}: {_PROMPT[:-1]}")
    return built


def by_model(found: Iterable[Contender]) -> Iterator[tuple[tuple[str, str | None], list[int]]]:
    """Group contenders by (model, dtype), with their positions in `found`, so that each model is loaded once."""
    groups: dict[tuple[str, str | None], list[int]] = {}
    for number, one in enumerate(found):
        groups.setdefault((one.model, one.dtype), []).append(number)
    yield from groups.items()
