"""Compare every engine and codec with full attention, on the user's own documents and questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from ragkv.engines import Engine, Request, make_engine
from ragkv.errors import RetrievalError, UsageError
from ragkv.evaluation.interval import Interval
from ragkv.evaluation.progress import Progress
from ragkv.evaluation.question import Question
from ragkv.evaluation.reader import Reader
from ragkv.evaluation.subject import Subject
from ragkv.evaluation.tally import Tally
from ragkv.evaluation.trace import Comparison, Trace, follow, greedy
from ragkv.evaluation.verdict import (
    ENOUGH,
    Verdict,
    codec_advice,
    codec_verdict,
    engine_advice,
    engine_verdict,
    loss_verdict,
)
from ragkv.runtime import Stream, runtime_of
from ragkv.store import Codec, codec_from_config

if TYPE_CHECKING:
    from ragkv.pipeline import RagKV

__all__ = ["CodecRow", "Doctor", "EngineRow", "Quality"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """An engine compared with `full`: shares in [0, 1], `kl` in nats per token, `accuracy` None without gold answers.

    `ci95` has the 95 % intervals of `kl`, `top1`, `answers` and `loss` (the accuracy of `full` minus the engine's; None
    without gold answers). `by` says what the verdict is based on: "accuracy" or "agreement".
    """

    engine: str
    verdict: Verdict
    by: Literal["accuracy", "agreement"]
    advice: str
    kl: float
    top1: float
    answers: float
    accuracy: float | None
    ci95: dict[str, Interval | None]
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecRow:
    """A codec compared with the same engine on unchanged KV. `size` is stored bytes divided by raw bytes.

    `ci95` has the 95 % intervals of `kl`, `top1` and `answers`, or is None for a codec that lost no bit.
    """

    engine: str
    codec: str
    verdict: Verdict
    advice: str
    exact: bool
    size: float
    kl: float
    top1: float
    answers: float
    accuracy: float | None
    ci95: dict[str, Interval] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """The report. `source` says where the questions came from; `skipped` of them retrieved nothing."""

    date: str
    ragkv: str
    model: str
    fingerprint: str
    generation: int
    source: str
    seed: int
    questions: int
    gold: int
    skipped: int
    tokens: int
    top_k: int
    max_new_tokens: int
    full_accuracy: float | None
    engines: tuple[EngineRow, ...]
    codecs: tuple[CodecRow, ...]

    def to_json(self) -> dict[str, Any]:
        """The report in the form that `ragkv doctor --json` prints and the index keeps."""
        return {
            **asdict(self),
            "engines": [asdict(row) for row in self.engines],
            "codecs": [asdict(row) for row in self.codecs],
        }


class Doctor:
    """A comparison of engines and codecs on one model and index. `examine` asks the questions."""

    def __init__(
        self,
        rag: RagKV,
        subject: Subject,
        *,
        engines: Sequence[str] | None = None,
        codecs: Sequence[str] = (),
        top_k: int | None = None,
        max_new_tokens: int = 64,
    ) -> None:
        """`engines` defaults to those with KV in the index. Raises UsageError for an unknown engine or codec."""
        if max_new_tokens < 1:
            raise UsageError(f"--max-new-tokens must be at least 1, not {max_new_tokens}.")
        names = dict.fromkeys(rag.config.engines if engines is None else engines)
        names.pop("full", None)  # the others are compared with it
        if not names:
            raise UsageError("There is no engine to compare with full; name some, such as --engines ape,block,pced.")
        self._rag = rag
        self._subject = subject
        self._full = make_engine("full", rag.config.tuning)
        self._engines = [make_engine(name, rag.config.tuning) for name in names]
        self._codecs: list[Codec] = [codec_from_config({"id": name}) for name in dict.fromkeys(codecs)]
        self._top_k = top_k or rag.config.top_k
        self._max_new_tokens = max_new_tokens
        self._reader = Reader(subject.model, subject.prompt, fingerprint=subject.fingerprint)

    def examine(
        self, questions: Sequence[Question], *, source: str, seed: int, on_progress: Progress | None = None
    ) -> Quality:
        """Ask all questions; nothing is written. Raises RetrievalError if no question finds a chunk."""
        notify = on_progress or (lambda done, total, what: None)
        pairs = [(e, c) for e in self._engines if e.encoding is not None for c in self._codecs]
        tallies = {engine.name: Tally() for engine in self._engines}
        coded = {(engine.name, codec.id): Tally() for engine, codec in pairs}
        full_right: list[bool] = []
        asked = tokens = 0
        each = 1 + len(self._engines) + len(pairs)
        for number, question in enumerate(questions):
            notify(number * each, len(questions) * each, "full")
            chunks = self._subject.retrieve(self._rag, question.text, top_k=self._top_k)
            if not chunks:
                continue
            asked += 1
            yardstick = self._answer(self._full, self._reader.request(self._full, question.text, chunks))
            tokens += len(yardstick.ids)
            if (right := question.right(yardstick.text)) is not None:
                full_right.append(right)
            step = number * each + 1
            for engine in self._engines:
                notify(step, len(questions) * each, engine.name)
                request = self._reader.request(engine, question.text, chunks)
                own = self._compare(engine, request, yardstick, question, tallies[engine.name])
                step += 1
                for codec in self._codecs if engine.encoding is not None else ():
                    notify(step, len(questions) * each, f"{engine.name}, {codec.id}")
                    self._compare_codec(engine, request, codec, own, question, coded[engine.name, codec.id])
                    step += 1
        if not asked:
            raise RetrievalError("No question finds a chunk of the index; ask with words that the documents use.")
        notify(len(questions) * each, len(questions) * each, "")
        full_accuracy = sum(full_right) / len(full_right) if full_right else None
        return Quality(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            ragkv=_version(),
            model=self._subject.name,
            fingerprint=self._subject.fingerprint,
            generation=self._rag.store.generation,
            source=source,
            seed=seed,
            questions=asked,
            gold=len(full_right),
            skipped=len(questions) - asked,
            tokens=tokens,
            top_k=self._top_k,
            max_new_tokens=self._max_new_tokens,
            full_accuracy=full_accuracy,
            engines=self._engine_rows(tallies, full_right),
            codecs=tuple(_codec_row(engine, codec, tally) for (engine, codec), tally in coded.items()),
        )

    def _answer(self, engine: Engine, request: Request) -> Trace:
        model = self._subject.model
        return greedy(
            model,
            Stream(runtime_of(model), engine, request),
            max_new_tokens=self._max_new_tokens,
            decoding=self._rag.config.decoding,
        )

    def _compare(self, engine: Engine, request: Request, reference: Trace, question: Question, tally: Tally) -> Trace:
        """Run the engine along the reference, then on its own if it differs. Returns its own answer."""
        model = self._subject.model
        compared = follow(model, Stream(runtime_of(model), engine, request), reference)
        if compared.same_answer:
            trace = replace(reference, log_probs=compared.log_probs)
        else:
            trace = self._answer(engine, request)
        tally.add(compared, same=trace.text == reference.text, right=question.right(trace.text))
        return trace

    def _compare_codec(
        self, engine: Engine, request: Request, codec: Codec, own: Trace, question: Question, tally: Tally
    ) -> None:
        """Compare with the engine's own answer on unchanged KV. A codec that lost no bit need not be asked."""
        recoded = self._reader.recoded(engine, request, codec)
        tally.exact = tally.exact and recoded.exact
        tally.stored_bytes += recoded.stored_bytes
        tally.raw_bytes += recoded.raw_bytes
        if recoded.exact:
            steps = len(own.ids)
            unchanged = Comparison(kl=(0.0,) * steps, agreed=(True,) * steps, log_probs=())
            tally.add(unchanged, same=True, right=question.right(own.text))
        else:
            self._compare(engine, recoded.request, own, question, tally)

    def _engine_rows(self, tallies: dict[str, Tally], full_right: list[bool]) -> tuple[EngineRow, ...]:
        verdicts: dict[str, Verdict] = {}
        losses = {name: tally.loss(full_right) for name, tally in tallies.items()}
        gold_decides = sum(full_right) >= ENOUGH
        for engine in self._engines:
            loss = losses[engine.name]
            verdicts[engine.name] = (
                loss_verdict(loss)
                if gold_decides and loss is not None
                else engine_verdict(tallies[engine.name].agreement, joined=engine.counts_winners)
            )
        good = next((name for name, verdict in verdicts.items() if verdict == "good"), None)
        tuned = bool(self._subject.model.checkpoint.recommended.get("block_tuned"))
        return tuple(
            EngineRow(
                engine=engine.name,
                verdict=verdicts[engine.name],
                by="accuracy" if gold_decides else "agreement",
                advice=engine_advice(engine.name, verdicts[engine.name], tuned_for_blocks=tuned, other=good),
                kl=tallies[engine.name].kl,
                top1=tallies[engine.name].top1,
                answers=tallies[engine.name].answers,
                accuracy=tallies[engine.name].accuracy,
                ci95={**asdict(tallies[engine.name].agreement), "loss": losses[engine.name]},
                settings=asdict(engine.config),
            )
            for engine in self._engines
        )


def _codec_row(engine: str, codec: str, tally: Tally) -> CodecRow:
    verdict = codec_verdict(tally.agreement, exact=tally.exact)
    return CodecRow(
        engine=engine,
        codec=codec,
        verdict=verdict,
        advice=codec_advice(codec, verdict, exact=tally.exact),
        exact=tally.exact,
        size=tally.stored_bytes / tally.raw_bytes,
        kl=tally.kl,
        top1=tally.top1,
        answers=tally.answers,
        accuracy=tally.accuracy,
        ci95=None if tally.exact else asdict(tally.agreement),
    )


def _version() -> str:
    import ragkv

    return ragkv.__version__
