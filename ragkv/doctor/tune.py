"""The greedy search of APE §4.4 over temperature and scale, on the user's own questions."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ragkv.config import load_config, save_config
from ragkv.doctor.questions import GoldenQuestion, Progress
from ragkv.engines import make_engine, require_supported
from ragkv.errors import RetrievalError, UsageError
from ragkv.runtime import Generation
from ragkv.util.files import locked

if TYPE_CHECKING:
    from ragkv.pipeline import RagKV
    from ragkv.types import ScoredChunk

STEPS = tuple(round(1 - tenth / 10, 1) for tenth in range(10))
"""Values of T and of S: 1.0, 0.9, … 0.1, the paper's (0, 1] in steps of 0.1."""

Stage = Literal["now", "temperature", "scale"]


@dataclass(frozen=True, slots=True, kw_only=True)
class APESetting:
    """The parameters of APE that are searched."""

    temperature: float
    scale: float

    @property
    def distance(self) -> tuple[float, float]:
        """The distance from a setting without effect. Among equally good settings, the nearest one is chosen."""
        return abs(1 - self.temperature), abs(1 - self.scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingScore:
    """A setting and its right answers among the asked questions, which are fewer if it was given up."""

    stage: Stage
    setting: APESetting
    right: float
    asked: int
    given_up: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Right answers to questions that the search did not use: of the old setting, of the winner, and of `full`."""

    asked: int
    now: int
    winner: int
    full: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The result of a search: all trials in order. `full` counts the right answers of full attention."""

    trials: tuple[SettingScore, ...]
    now: APESetting
    winner: APESetting
    full: int
    asked: int
    skipped: int
    held_out: HeldOut | None

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "trials": [{**asdict(trial), "winner": trial.setting == self.winner} for trial in self.trials],
        }


class Tuner:
    """A search over one index. Open the index for reading: its KV is used, and what it lacks is encoded.

    In each stage, every question is asked with all settings before the next one, so that a chunk is loaded once per
    stage, however little memory there is.
    """

    def __init__(self, rag: RagKV, *, top_k: int | None = None, max_new_tokens: int = 64) -> None:
        if max_new_tokens < 1:
            raise UsageError(f"--max-new-tokens must be at least 1, not {max_new_tokens}.")
        self._rag = rag
        self._top_k = top_k or rag.config.top_k
        # greedy, with the index's stop strings
        decoding = replace(rag.config.decoding, temperature=0.0)
        self._generation = Generation(max_new_tokens=max_new_tokens, decoding=decoding)
        self._ape = rag.config.tuning.get("ape", {})
        engine = make_engine("ape", rag.config.tuning, context=rag.config.encoding.context)
        require_supported(engine, rag.model)
        self.now = APESetting(temperature=engine.config.temperature, scale=engine.config.scale)
        self._scored: dict[str, list[ScoredChunk]] = {}

    def search(
        self,
        questions: Sequence[GoldenQuestion],
        *,
        held_out: Sequence[GoldenQuestion] = (),
        on_progress: Progress | None = None,
    ) -> Search:
        """Search T at S = 1, then S at the best T. The index's own setting is tried too.

        Questions that retrieve nothing are left out. Raises UsageError without gold answers, and RetrievalError if no
        question finds a chunk.
        """
        if any(not question.answers for question in (*questions, *held_out)):
            raise UsageError("The search counts right answers, so every question needs gold answers.")
        asked, validation = self._answerable(questions), self._answerable(held_out)
        if not asked:
            raise RetrievalError("No question finds a chunk of the index; ask with words that the documents use.")
        done, total = 0, len(asked) * (2 + 2 * len(STEPS)) + 3 * len(validation)
        trials: dict[APESetting, SettingScore] = {}

        def notify(count: int, what: str) -> None:
            nonlocal done
            done += count
            if on_progress is not None:
                on_progress(done, total, what)

        def measure(stage: Stage, settings: Sequence[APESetting]) -> APESetting:
            def ask(question: GoldenQuestion, left: Sequence[APESetting]) -> list[bool]:
                notify(len(settings), stage)
                return [self._right(question, setting) for setting in left]

            return search_stage(stage, settings, [(1, partial(ask, question)) for question in asked], trials)

        def count(questions: Sequence[GoldenQuestion], setting: APESetting | None, what: str) -> int:
            right = 0
            for question in questions:
                right += self._right(question, setting)
                notify(1, what)
            return right

        full = count(asked, None, "full")
        measure("now", [self.now])
        best = measure("temperature", [APESetting(temperature=value, scale=1.0) for value in STEPS])
        measure("scale", [replace(best, scale=value) for value in STEPS])
        winner = _best(trials.values())
        validated = None
        if validation:
            now, won, yardstick = (count(validation, setting, "held out") for setting in (self.now, winner, None))
            validated = HeldOut(asked=len(validation), now=now, winner=won, full=yardstick)
        return Search(
            trials=tuple(trials.values()),
            now=self.now,
            winner=winner,
            full=full,
            asked=len(asked),
            skipped=len(questions) + len(held_out) - len(asked) - len(validation),
            held_out=validated,
        )

    def _answerable(self, questions: Sequence[GoldenQuestion]) -> list[GoldenQuestion]:
        """The questions that retrieve something."""
        return [question for question in questions if self._chunks(question.text)]

    def _chunks(self, question: str) -> list[ScoredChunk]:
        """The chunks for a question, the best last; they are remembered."""
        if question not in self._scored:
            self._scored[question] = self._rag.retrieve(question, top_k=self._top_k)[::-1]
        return self._scored[question]

    def _right(self, question: GoldenQuestion, setting: APESetting | None) -> bool:
        """Whether APE with `setting` answers right (None: `full`)."""
        rag, text = self._rag, ""
        settings = {} if setting is None else {**self._ape, **asdict(setting)}
        name = "full" if setting is None else "ape"
        engine = make_engine(name, {name: settings}, context=rag.config.encoding.context)
        request, _ = rag.request(engine, question.text, self._chunks(question.text))
        with closing(rag.index.runtime.decode(engine, request, self._generation)) as tokens:
            for token in tokens:
                text += token.text
                if token.text and question.right(text):  # later tokens cannot change the result
                    return True
        return False


def split(questions: Sequence[GoldenQuestion], seed: int) -> tuple[list[GoldenQuestion], list[GoldenQuestion]]:
    """Split questions into a half to search on and a half to hold out. Raises UsageError for fewer than two."""
    if len(questions) < 2:
        raise UsageError("--holdout needs at least two questions.")
    back = set(random.Random(seed).sample(range(len(questions)), len(questions) // 2))
    return [q for i, q in enumerate(questions) if i not in back], [q for i, q in enumerate(questions) if i in back]


def write_setting(folder: Path, setting: APESetting) -> None:
    """Write a setting into the index's `ragkv.toml` atomically, and keep everything else in it."""
    with locked(folder):
        config = load_config(folder)
        ape = {**config.tuning.get("ape", {}), "temperature": setting.temperature, "scale": setting.scale}
        save_config(folder, replace(config, tuning={**config.tuning, "ape": ape}))


def search_stage(
    stage: Stage,
    settings: Sequence[APESetting],
    portions: Sequence[tuple[int, Callable[[Sequence[APESetting]], Sequence[float]]]],
    trials: dict[APESetting, SettingScore],
    *,
    keep: APESetting | None = None,
) -> APESetting:
    """One stage of the greedy search: try the settings that `trials` lacks, and return the best of `settings`. On a
    tie, the one that changes least wins.

    A portion is a number of questions and a function that gives each setting's right answers to them. A setting is
    given up, unless it is `keep`, if it could not catch up even by answering all remaining questions right. The search
    finds the same setting, without generating the long answers of hopeless ones.
    """
    known = [trials[setting] for setting in settings if setting in trials]
    right: dict[APESetting, float] = {setting: 0 for setting in settings if setting not in trials}
    asked, total = dict.fromkeys(right, 0), sum(count for count, _ in portions)
    done, left = 0, list(right)
    for count, ask in portions:
        for setting, correct in zip(left, ask(left), strict=True):
            right[setting] += correct
            asked[setting] += count
        done += count
        lead = max([*right.values(), *(trial.right for trial in known)], default=0)
        left = [setting for setting in left if setting == keep or right[setting] + total - done >= lead]
    for setting, correct in right.items():
        given_up = asked[setting] < total
        trials[setting] = SettingScore(
            stage=stage, setting=setting, right=correct, asked=asked[setting], given_up=given_up
        )
    return _best(trials[setting] for setting in settings)


def _best(trials: Iterable[SettingScore]) -> APESetting:
    finished = (trial for trial in trials if not trial.given_up)
    return min(finished, key=lambda trial: (-trial.right, *trial.setting.distance)).setting
