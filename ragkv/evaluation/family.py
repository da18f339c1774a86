"""One family of models: what each engine answers with it beside dense forwards of transformers, token by token."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ragkv.engines.ability import require_able
from ragkv.engines.base import ContextChunk, Engine, Request
from ragkv.engines.registry import make_engine
from ragkv.errors import ModelLoadError, UnsupportedModelError
from ragkv.model.checkpoint import Checkpoint
from ragkv.model.dense import Dense, Prompt
from ragkv.model.language import LanguageModel
from ragkv.model.proven import proven
from ragkv.runtime import Stream, runtime_of
from ragkv.types import Encoding

__all__ = ["ENGINES", "EXACT", "Verdict", "examine"]

ENGINES = ("full", "pced", "block", "ape")
EXACT = 5e-5
"""The largest difference of scores, over the largest score, that fp32 rounding explains."""
_PREFIX, _CHUNKS, _SUFFIX = 6, (17, 29, 11), 7  # together longer than a window of 24, and one chunk alone
_SCORES = [0.3, 0.8, 0.55]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came out for one family.

    `errors`: of each engine that runs it, the largest difference from the reference over the largest score. `reasons`:
    of each that refuses it, the sentence.
    """

    family: str
    errors: Mapping[str, float] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def refused(cls, family: str, reason: str) -> Verdict:
        """Every engine refuses it for the same reason."""
        return cls(family=family, reasons=dict.fromkeys(ENGINES, reason))

    @property
    def error(self) -> float | None:
        """The worst of its engines; None where none runs it."""
        return max(self.errors.values(), default=None)

    @property
    def reason(self) -> str:
        """Why engines refuse it: each sentence once, "" where none does."""
        return " ".join(dict.fromkeys(self.reasons.values()))

    @property
    def why(self) -> str:
        """The reasons alone, each once: without the names of model and engine, and without advice."""
        cores = (_core(sentence) for sentence in re.split(r"(?<=\.) (?=Engine ')", self.reason))
        return "; ".join(dict.fromkeys(core for core in cores if core))

    def engine(self, name: str) -> str:
        """`exact`, `refused`, or `wrong`: accepted although the numbers differ, which is a fault of ragkv."""
        if name in self.reasons:
            return "refused"
        return "exact" if self.errors.get(name, math.inf) <= EXACT else "wrong"

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Verdict:
        """The verdict that a row of `to_json` tells: every engine that ran has the worst of their errors."""
        refused = [name for name, told in row["engines"].items() if told == "refused"]
        return cls(
            family=row["family"],
            errors={
                name: math.inf if told == "wrong" else row["error"]
                for name, told in row["engines"].items()
                if told != "refused"
            },
            reasons=dict.fromkeys(refused, row["reason"] or ""),
        )

    def to_json(self) -> dict[str, Any]:
        """The row as `ragkv models --json` prints it."""
        return {
            "family": self.family,
            "engines": {name: self.engine(name) for name in ENGINES},
            "error": float(f"{self.error:.1e}") if self.error is not None and math.isfinite(self.error) else None,
            "reason": self.reason or None,
        }


def _core(sentence: str) -> str:
    for start in (r"Model '[^']*' \([^)]*\) is not supported: ", r"Engine '[^']*' cannot run on model '[^']*': "):
        sentence = re.sub(rf"^{start}", "", sentence)
    return re.sub(r"; use engine '[^']*'\.$", "", sentence).rstrip(".")


def examine(family: str, model: Any, tokenizer: Any, *, seed: int = 0, steps: int = 8) -> Verdict:
    """Load transformers' `model` as ragkv does; then, if it is accepted, compare `steps` greedy tokens of each engine.

    Refusals are told in the verdict; no other exception is caught.
    """
    generator = torch.Generator().manual_seed(100 + seed)
    high = min(model.config.get_text_config(decoder=True).vocab_size, 300)
    prefix, *chunks, suffix = (
        torch.randint(3, high, (n,), generator=generator).tolist() for n in (_PREFIX, *_CHUNKS, _SUFFIX)
    )
    prompt = Prompt(prefix=prefix, chunks=chunks, suffix=suffix, scores=_SCORES, temperature=0.7, scale=0.6)
    dense = Dense(model, prompt)
    try:
        language = proven(model, tokenizer, Checkpoint(name=family, location=family, local=True))
    except (UnsupportedModelError, ModelLoadError) as error:
        return Verdict.refused(family, str(error))
    engines = {name: make_engine(name, {name: _options(name, prompt)}) for name in ENGINES}
    reasons = {name: reason for name, engine in engines.items() if (reason := _refusal(engine, language))}
    with torch.inference_mode():
        errors = {name: _worst(language, dense, engines[name], steps) for name in ENGINES if name not in reasons}
    return Verdict(family=family, errors=errors, reasons=reasons)


def _refusal(engine: Engine, language: LanguageModel) -> str:
    """The sentence with which `engine` refuses the model, "" if it does not."""
    try:
        require_able(engine, language)
    except UnsupportedModelError as error:
        return str(error)
    return ""


def _worst(language: LanguageModel, dense: Dense, engine: Engine, steps: int) -> float:
    """The largest difference of an engine's scores from the reference's, over the largest score."""
    stream = Stream(runtime_of(language), engine, _request(language, dense.prompt, engine))
    out: list[int] = []
    worst = 0.0
    for _ in range(steps):
        expected = dense.scores(engine.name, out)
        off = float((stream.scores - expected).abs().max() / expected.abs().max())
        worst = max(worst, off if math.isfinite(off) else math.inf)
        out.append(int(expected.argmax()))
        stream.advance(out[-1])
    return worst


def _options(name: str, prompt: Prompt) -> dict[str, Any]:
    return {"temperature": prompt.temperature, "scale": prompt.scale} if name == "ape" else {}


def _request(language: LanguageModel, prompt: Prompt, engine: Engine) -> Request:
    """The prompt as the engine is given it, its chunks encoded as it wants them."""
    prefix = None
    kvs: list[Any] = [None] * len(prompt.chunks)
    if engine.encoding is not None:
        [prefix] = language.encode([prompt.prefix])
        kvs = language.encode(prompt.chunks, prefix=prefix if engine.encoding is Encoding.PREFIXED else None)
    chunks = zip(prompt.chunks, prompt.scores, kvs, strict=True)
    return Request(
        prefix_ids=tuple(prompt.prefix),
        chunks=tuple(ContextChunk(token_ids=tuple(ids), score=score, kv=kv) for ids, score, kv in chunks),
        suffix_ids=tuple(prompt.suffix),
        prefix=prefix,
    )
