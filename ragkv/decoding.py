"""The decoding settings of a request: how tokens are chosen, which texts are allowed, and when the answer ends."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

from ragkv.errors import ConfigError, extra
from ragkv.util.constraints import Constraint, compile_constraint
from ragkv.util.options import Option, doors

DECODING_PANEL = "Decoding (default: as ragkv.toml says, else greedy)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """The settings of one request. Decoding is greedy unless they ask for sampling; the model's own
    `generation_config` is not read.

    Without a `temperature`, decoding is greedy, or samples at temperature 1 if `top_p`, `top_k_tokens` or `min_p` is
    set; temperature 0 is always greedy. The penalties only count generated tokens and not the prompt, because an answer
    from documents has to repeat their words; `presence_penalty` and `frequency_penalty` are OpenAI's. Without a `seed`,
    one is drawn for each request, and the answer reports it. An answer ends before the first of the `stop` strings, or
    at one of `stop_ids` or of the model's own end tokens.

    One of `schema` (a JSON schema as text, see `schema_text`), `regex` and `grammar` (Lark, as llguidance reads it)
    constrains the answer: it matches, unless it was cut at its length limit. ConfigError for one that cannot be used.

    `thinking`: whether a model that can think before it answers does ("on"), does not ("off"), or does for at most that
    many tokens. These count towards the length limit; `stop` and the constraints apply to the answer after them.
    """

    temperature: Annotated[
        float | None,
        Option("0 is greedy decoding; above 0, tokens are drawn.", panel=DECODING_PANEL, doors=doors("chat", "ranks")),
    ] = None
    top_p: Annotated[
        float | None,
        Option("Draw from the most likely tokens that together have this probability.", panel=DECODING_PANEL),
    ] = None
    top_k_tokens: Annotated[
        int | None,
        Option("Draw from this many of the most likely tokens.", panel=DECODING_PANEL),
    ] = None
    min_p: Annotated[
        float | None,
        Option(
            "Draw from the tokens with at least this share of the most likely token's probability.",
            panel=DECODING_PANEL,
        ),
    ] = None
    repetition_penalty: Annotated[
        float, Option("Above 1, tokens that the answer already contains become less likely.", panel=DECODING_PANEL)
    ] = 1.0
    presence_penalty: Annotated[
        float, Option("From -2 to 2: subtracted once from each token that the answer contains.", panel=DECODING_PANEL)
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Option("From -2 to 2: subtracted for each time that the answer contains a token.", panel=DECODING_PANEL),
    ] = 0.0
    seed: Annotated[
        int | None,
        Option("With the same seed, the same tokens are drawn.", panel=DECODING_PANEL, doors=doors("chat", "ranks")),
    ] = None
    stop: Annotated[
        tuple[str, ...],
        Option("End the answer before this text.", panel=DECODING_PANEL),
    ] = ()
    stop_ids: tuple[int, ...] = ()
    schema: Annotated[
        str | None,
        Option(
            "Answer in JSON by this JSON schema, or end at the greatest length.",
            panel=DECODING_PANEL,
            in_file=True,
            is_json=True,
        ),
    ] = None
    regex: Annotated[str | None, Option("The whole answer matches this regular expression.", panel=DECODING_PANEL)] = (
        None
    )
    grammar: Annotated[
        str | None, Option("The answer matches this Lark grammar.", panel=DECODING_PANEL, in_file=True)
    ] = None
    thinking: Annotated[
        int | str,
        Option(
            "Whether a model that can think does before it answers: off, on, or a number of tokens.",
            panel=DECODING_PANEL,
        ),
    ] = "off"

    def __post_init__(self) -> None:
        _number(
            "temperature", self.temperature, lambda t: t == 0 or 1e-4 <= t <= 100, "0 (greedy) or from 0.0001 to 100"
        )
        _number("top_p", self.top_p, lambda p: 0 < p <= 1, "above 0 and at most 1")
        _number("top_k_tokens", self.top_k_tokens, lambda k: k >= 1, "a whole number from 1", whole=True)
        _number("min_p", self.min_p, lambda p: 0 < p <= 1, "above 0 and at most 1")
        penalty = self.repetition_penalty
        _number("repetition_penalty", penalty, lambda r: 0.01 <= r <= 100, "from 0.01 to 100 (1: none)", unset=False)
        for name in ("presence_penalty", "frequency_penalty"):
            _number(name, getattr(self, name), lambda p: -2 <= p <= 2, "from -2 to 2 (0: none)", unset=False)
        _number("seed", self.seed, lambda s: 0 <= s < 1 << 63, "a whole number from 0 to 2^63 - 1", whole=True)
        object.__setattr__(self, "stop", _each("stop", self.stop, _is_text, "strings that are not empty"))
        object.__setattr__(self, "stop_ids", _each("stop_ids", self.stop_ids, _is_id, "token ids from 0"))
        if self.thinking not in ("on", "off"):
            _number("thinking", self.thinking, lambda n: n >= 1, '"on", "off" or a number of tokens from 1', whole=True)
        kinds = [name for name in ("schema", "regex", "grammar") if getattr(self, name) is not None]
        if len(kinds) + bool(self.stop and kinds) > 1:
            others = " and ".join([*kinds, *(["stop"] if self.stop else [])])
            raise ConfigError(f"decoding: {others} cannot be used together; leave one out.", param=kinds[-1])
        _ = self.constraint

    @property
    def constraint(self) -> Constraint | None:
        """The grammar of the allowed answers; None if every text is allowed."""
        return _constraint(self.schema, self.regex, self.grammar)

    @property
    def effective_temperature(self) -> float:
        """The effective temperature; 0 is greedy."""
        if self.temperature is not None:
            return self.temperature
        return 0.0 if self.top_p is None and self.top_k_tokens is None and self.min_p is None else 1.0

    def settled(self) -> Self:
        """The same settings with the temperature, and for sampling the seed, filled in."""
        seed = secrets.randbits(32) if self.seed is None and self.effective_temperature else self.seed
        return replace(self, temperature=self.effective_temperature, seed=seed)


def schema_text(schema: Any) -> str:
    """A JSON schema as JSON text: from a text, a mapping, or a class of pydantic."""
    if isinstance(schema, str):
        return schema
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    try:
        return json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"decoding: schema is not a JSON schema: {error}.", param="schema") from error


def _constraint(schema: str | None, regex: str | None, grammar: str | None) -> Constraint | None:
    """The compiled one of these."""
    by_kind = {"schema": schema, "regex": regex, "grammar": grammar}
    kind, text = next(((kind, text) for kind, text in by_kind.items() if text is not None), ("", ""))
    if not kind:
        return None
    if not text:
        raise ConfigError("decoding: schema, regex and grammar must not be empty; leave it out.", param=kind)
    with extra(f"An answer by a {kind} needs llguidance", "structured", param=kind):
        import llguidance  # noqa: F401 - the model's process needs it, too
    try:
        return compile_constraint(kind, text)
    except ValueError as error:
        raise ConfigError(f"decoding: {kind} cannot be used: {error}.", param=kind) from None


def _number(
    name: str, value: Any, fits: Callable[[Any], bool], wanted: str, *, whole: bool = False, unset: bool = True
) -> None:
    if value is None and unset:
        return
    kind = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not fits(value):
        raise ConfigError(f"decoding: {name} must be {wanted}, not {value!r}.", param=name)


def _each(name: str, values: Any, fits: Callable[[Any], bool], wanted: str) -> tuple[Any, ...]:
    """The values as a tuple. A bare string is an error: the caller probably meant a list of one string."""
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
        raise ConfigError(f"decoding: {name} must be a list of {wanted}, not {values!r}.", param=name)
    items = tuple(values)
    for value in items:
        if not fits(value):
            raise ConfigError(f"decoding: {name} must hold {wanted}, not {value!r}.", param=name)
    return items


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`, excluding `stop` itself."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)


GREEDY = Decoding()
