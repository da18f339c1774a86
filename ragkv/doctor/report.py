"""`ragkv doctor`: compare every engine and codec with full attention on the user's own documents and questions."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import ragkv
from ragkv.config import EncodingConfig, IndexConfig
from ragkv.doctor.compare import ChunkReader, Comparer, Comparison, LogitTrace, RoundTrip, with_kv
from ragkv.doctor.questions import GoldenQuestion, Progress
from ragkv.doctor.specs import Spec
from ragkv.doctor.verdicts import (
    CODEC_ADVICE,
    CODEC_LIMITS,
    ENGINE_LIMITS,
    ENOUGH,
    WEIGHTS_ADVICE,
    Agreement,
    CodecRow,
    ConversationRow,
    EngineRow,
    MetricValue,
    Quality,
    agreement_verdict,
    difference_interval,
    engine_advice,
    loss_verdict,
    mean_interval,
    proposed,
    share_interval,
)
from ragkv.engines import Request, make_engine, unsupported_reason
from ragkv.errors import RetrievalError, UsageError
from ragkv.index.conversation import Conversation, Turn, proved_history
from ragkv.index.quality import Verdict
from ragkv.store import codec_from_config
from ragkv.types import Capability, ScoredChunk

if TYPE_CHECKING:
    from ragkv.pipeline import RagKV

EARLIER = 4
"""A question is asked again after this many earlier turns, to see whether the model can hold a conversation."""
WINDOW = 256
"""The `[encoding] context` that is tried on an index without."""


class EngineTrial:
    """An engine with the index's settings, changed by the options of a spec. `codecs` are tried on its KV."""

    def __init__(self, spec: Spec, config: IndexConfig, codecs: Sequence[str] = ()) -> None:
        settings = {**config.tuning.get(spec.name, {}), **spec.options}
        self.window = EncodingConfig(context=settings.pop("context", config.encoding.context)).context
        self.engine = make_engine(spec.name, {spec.name: settings}, context=self.window)
        self.label = str(spec)
        self.options = dict(spec.options)
        self.codecs = {} if self.engine.encoding is None else {name: codec_from_config({"id": name}) for name in codecs}


@dataclass(slots=True)
class Tally:
    """What was measured of an engine or a codec, question by question. KL and top-1 are means over tokens, so a long
    answer weighs more.
    """

    tokens: list[int] = field(default_factory=list)
    kl_sums: list[float] = field(default_factory=list)
    agreed: list[int] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    kv_bytes: list[int] = field(default_factory=list)
    trips: list[RoundTrip] = field(default_factory=list)

    def add(self, question: GoldenQuestion, trace: LogitTrace, comparison: Comparison | None = None) -> None:
        if (right := question.right(trace.text)) is not None:
            self.right.append(right)
        if comparison is not None:
            self.tokens.append(len(comparison.kl))
            self.kl_sums.append(sum(comparison.kl))
            self.agreed.append(sum(comparison.agreed))
            self.same.append(comparison.same)

    def time(self, trace: LogitTrace, request: Request) -> None:
        """Count the time to the first token, and the bytes of KV of which equal chunks share one."""
        self.first_token.append(trace.first_token)
        self.kv_bytes.append(sum({id(kv): kv.nbytes for each in request.chunks if (kv := each.kv)}.values()))

    @property
    def median_first_token(self) -> float:
        return statistics.median(self.first_token)

    @property
    def accuracy(self) -> float | None:
        return sum(self.right) / len(self.right) if self.right else None

    @property
    def agreement(self) -> Agreement:
        """The intervals of KL, and of the shares of first choices and of whole answers."""
        return Agreement(
            kl=mean_interval(self.kl_sums, self.tokens),
            top1=share_interval(self.agreed, self.tokens),
            answers=share_interval(self.same),
        )

    def figures(self) -> dict[str, Any]:
        """The fields that all rows have."""
        return {
            "kl": sum(self.kl_sums) / sum(self.tokens),
            "top1": sum(self.agreed) / sum(self.tokens),
            "answers": sum(self.same) / len(self.same),
            "accuracy": self.accuracy,
        }

    def judged(self, before: Sequence[bool], *, joined: bool) -> dict[str, Any]:
        """The verdict, what it is based on, and the intervals; `before` says which answers of the other were right."""
        loss = None
        if self.right:
            loss = difference_interval([other - own for other, own in zip(before, self.right, strict=True)])
        by_gold = loss is not None and sum(before) >= ENOUGH
        by_agreement = agreement_verdict(ENGINE_LIMITS, self.agreement, joined=joined)
        return {
            "verdict": loss_verdict(loss) if loss and by_gold else by_agreement,
            "by": "accuracy" if by_gold else "agreement",
            "ci95": {**asdict(self.agreement), "loss": loss},
        }

    def codec_row(self, engine: str, codec: str, size: float, advice: Mapping[Verdict, str]) -> CodecRow:
        exact = bool(self.trips) and all(trip.exact for trip in self.trips)
        verdict: Verdict = "good" if exact else agreement_verdict(CODEC_LIMITS, self.agreement)
        return CodecRow(
            engine=engine,
            codec=codec,
            verdict=verdict,
            advice="Gives every bit back." if exact else advice[verdict],
            exact=exact,
            size=size,
            ci95=None if exact else asdict(self.agreement),
            **self.figures(),
        )


def compared_engines(specs: Sequence[Spec]) -> list[Spec]:
    """The engines without `full`, with which they are compared; UsageError if there is no other."""
    others = [spec for spec in {str(spec): spec for spec in specs}.values() if str(spec) != "full"]
    if not others:
        raise UsageError("There is no engine to compare with full; name some, such as --engines ape,block,pced.")
    return others


class Doctor:
    """A comparison of engines and codecs on one model and index. `examine` asks the questions; nothing is written."""

    def __init__(
        self,
        rag: RagKV,
        model: str | None = None,
        *,
        engines: Sequence[Spec] | None = None,
        codecs: Sequence[str] = (),
        top_k: int | None = None,
        max_new_tokens: int = 64,
    ) -> None:
        """`model` defaults to the index's, and `engines` to those with KV in the index and those that could replace
        them (`_alternatives`). Options of a `Spec` override `[tuning.<engine>]`, its `context` that of `[encoding]`.

        Raises UsageError for an unknown engine or codec.
        """
        if max_new_tokens < 1:
            raise UsageError(f"--max-new-tokens must be at least 1, not {max_new_tokens}.")
        config = rag.config
        self._rag = rag
        self._top_k = top_k or config.top_k
        self._max_new_tokens = max_new_tokens
        names = config.engines if engines is None else [spec.name for spec in engines]
        self.reader = ChunkReader(rag, model, engines=names)
        if Capability.TENSORS in self.reader.model.missing_capabilities:
            codecs = ()  # the runtime's own states are stored as they are
        specs = [*map(Spec, config.engines), *_alternatives(config, self.reader)] if engines is None else engines
        self._trials = [
            EngineTrial(spec, config, codecs if engines is not None or str(spec) in config.engines else ())
            for spec in compared_engines(specs)
        ]
        self._full = EngineTrial(Spec("full"), config)
        everyone = [self._full, *self._trials]
        self._usual = next((trial for trial in everyone if trial.label == config.default_engine), self._full)
        self._exact = ChunkReader(rag, model, "float32") if self.reader.model.int8 else None

    def examine(
        self,
        questions: Sequence[GoldenQuestion],
        *,
        source: str,
        seed: int,
        retrieval: Sequence[MetricValue] = (),
        on_progress: Progress | None = None,
    ) -> Quality:
        """Ask all questions. Raises RetrievalError if no question finds a chunk.

        `retrieval` is what was measured of the modes of retrieval.
        """
        tallies: dict[str, Tally] = {}
        turns: list[Turn] = []
        steps = 2 + sum(1 + len(trial.codecs) for trial in self._trials) + (self._exact is not None)
        for number, question in enumerate(questions):
            done = number * steps

            def notify(what: str) -> Tally:
                nonlocal done
                if on_progress is not None:
                    on_progress(done, len(questions) * steps, what)
                done += 1
                return tallies.setdefault(what, Tally())

            if scored := self._rag.retrieve(question.text, top_k=self._top_k):
                self._ask(question, scored, turns, notify)
        if on_progress is not None:
            on_progress(len(questions) * steps, len(questions) * steps, "")
        if not tallies:
            raise RetrievalError("No question finds a chunk of the index; ask with words that the documents use.")
        return self._report(tallies, source=source, seed=seed, questions=len(questions), retrieval=tuple(retrieval))

    def _ask(
        self,
        question: GoldenQuestion,
        scored: Sequence[ScoredChunk],
        turns: list[Turn],
        notify: Callable[[str], Tally],
    ) -> None:
        """Ask one question of everyone. `notify` returns the tally of what is done next."""
        decoding = self._rag.config.decoding
        comparer = Comparer(self.reader.model, max_new_tokens=self._max_new_tokens, decoding=decoding)

        def request_of(trial: EngineTrial, reader: ChunkReader, text: str = question.text) -> Request:
            return reader.request(trial.engine, text, scored, window=trial.window)

        tally = notify("full")
        request = request_of(self._full, self.reader)
        reference = usual = comparer.answer(self._full.engine, request)
        tally.add(question, reference)
        tally.time(reference, request)
        for trial in self._trials:
            tally = notify(trial.label)
            request = request_of(trial, self.reader)
            comparison, trace = comparer.along(trial.engine, request, reference)
            tally.add(question, trace, comparison)
            tally.time(trace, request)
            if trial is self._usual:
                usual = trace
            for name, codec in trial.codecs.items():
                tally = notify(f"{trial.label}, {name}")
                trip = RoundTrip(codec)
                coded = with_kv(request, trip)
                if trip.exact:
                    count = len(trace.ids)
                    comparison, own = Comparison(kl=(0.0,) * count, agreed=(True,) * count), trace
                else:
                    comparison, own = comparer.along(trial.engine, coded, trace)
                tally.trips.append(trip)
                tally.add(question, own, comparison)
        if len(turns) >= EARLIER:
            tally = notify("conversation")
            tokens = self.reader.model.tokens
            talk = Conversation(self._rag.config.prompt, lambda text: len(tokens.encode(text)))
            talk.turns += turns[-EARLIER:]
            request = request_of(self._usual, self.reader, talk.prompt_text(question.text))
            comparison, trace = comparer.along(self._usual.engine, request, usual)
            tally.add(question, trace, comparison)
        turns.append(Turn(question=question.text, answer=usual.text))
        if self._exact is not None:
            tally = notify("float32 weights")
            exact = Comparer(self._exact.model, max_new_tokens=self._max_new_tokens, decoding=decoding)
            comparison, trace = exact.along(self._full.engine, request_of(self._full, self._exact), reference)
            tally.add(question, trace, comparison)

    def _report(
        self,
        tallies: Mapping[str, Tally],
        *,
        source: str,
        seed: int,
        questions: int,
        retrieval: tuple[MetricValue, ...],
    ) -> Quality:
        full = tallies["full"]
        asked = len(full.first_token)
        judged = {
            trial.label: tallies[trial.label].judged(full.right, joined=trial.engine.counts_winners)
            for trial in self._trials
        }
        good = next((trial.engine.name for trial in self._trials if judged[trial.label]["verdict"] == "good"), None)
        tuned = bool(self.reader.model.checkpoint.recommended.get("block_tuned"))
        rows = tuple(
            EngineRow(
                engine=trial.engine.name,
                label=trial.label,
                options=trial.options,
                advice=engine_advice(
                    trial.engine.name, judged[trial.label]["verdict"], tuned_for_blocks=tuned, other=good
                ),
                settings=asdict(trial.engine.config),
                first_token=tallies[trial.label].median_first_token,
                kv_bytes=sum(tallies[trial.label].kv_bytes) // asked,
                **judged[trial.label],
                **tallies[trial.label].figures(),
            )
            for trial in self._trials
        )
        codecs = []
        if self._exact is not None:  # measures int8 weights: `full` in float32 beside `full` as it runs here
            codecs.append(tallies["float32 weights"].codec_row("full", "int8 weights", 0.25, WEIGHTS_ADVICE))
        for trial in self._trials:
            for name in trial.codecs:
                coded = tallies[f"{trial.label}, {name}"]
                raw_bytes = max(1, sum(trip.raw_bytes for trip in coded.trips))
                size = sum(trip.stored_bytes for trip in coded.trips) / raw_bytes
                codecs.append(coded.codec_row(trial.label, name, size, CODEC_ADVICE))
        return Quality(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            ragkv=ragkv.__version__,
            model=self.reader.name,
            fingerprint=self.reader.cut_by,
            generation=self._rag.store.generation,
            source=source,
            seed=seed,
            questions=asked,
            gold=len(full.right),
            skipped=questions - asked,
            tokens=sum(tallies[self._trials[0].label].tokens),
            top_k=self._top_k,
            max_new_tokens=self._max_new_tokens,
            full_accuracy=full.accuracy,
            full_first_token=full.median_first_token,
            proposal=proposed(rows, full.median_first_token),
            engines=rows,
            codecs=tuple(codecs),
            conversation=self._conversation_row(tallies),
            retrieval=retrieval,
        )

    def _conversation_row(self, tallies: Mapping[str, Tally]) -> ConversationRow | None:
        if (talked := tallies.get("conversation")) is None:
            return None
        # the questions after the first ones; those without gold answers count for neither
        right = tallies[self._usual.label].right
        alone = right[len(right) - len(talked.right) :]
        judged = talked.judged(alone, joined=self._usual.engine.counts_winners)
        return ConversationRow(
            engine=self._usual.engine.name,
            history=proved_history(judged["verdict"], judged["by"]),
            questions=len(talked.same),
            turns=EARLIER,
            alone=sum(alone) / len(alone) if alone else None,
            **judged,
            **talked.figures(),
        )


def _alternatives(config: IndexConfig, reader: ChunkReader) -> list[Spec]:
    """Settings that could replace the index's engines, if the model runs them: `block` over the other chunk KV,
    `blend`, and `block` over chunks that have seen their document.
    """
    block = make_engine("block", config.tuning).config
    specs = [Spec(name) for name in ("block", "blend") if name not in config.engines]
    if block.preset != "no-positions":
        specs.append(Spec("block", {"over": "standalone" if block.over == "prefixed" else "prefixed"}))
        if not config.encoding.context:
            over = {} if block.over == "prefixed" else {"over": "prefixed"}
            specs.append(Spec("block", {**over, "context": WINDOW}))
    return [spec for spec in specs if unsupported_reason(EngineTrial(spec, config).engine, reader.model) is None]
