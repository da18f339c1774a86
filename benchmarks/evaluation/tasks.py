"""The built-in tasks, by the names used on the command line. All are generated, and determined by their seed.

Questions about fictional worlds, many-shot labels and variables use names that no model has seen, so that an answer can
come only from the chunks; distractors are of the same world. Many-shot labels follow APE Table 3, the tasks in words of
one token each APB Table 3.
"""

from __future__ import annotations

import inspect
import random
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from ragkv.benchmarks.evaluation.metrics import Example, Task
from ragkv.benchmarks.evaluation.worlds.text import (
    GROUPS,
    Shots,
    asked,
    neutral_sentence,
    shot_text,
    variable_list,
)
from ragkv.benchmarks.evaluation.worlds.world import QuestionKind, Split, World, WorldDocument, WorldQuestion, listed
from ragkv.doctor.specs import Spec
from ragkv.errors import UsageError


def require(name: str, value: int, least: int, most: int | None = None) -> None:
    """Raise UsageError if a size is out of range."""
    if value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise UsageError(f"{name} of the task must be {bounds}, not {value}.")


def require_sizes(limit: int, chunks: int, words: int) -> None:
    """Raise UsageError if a size of a task with chunks of `words` words is out of range."""
    require("limit", limit, 1)
    require("chunks", chunks, 1, 1024)
    require("words", words, 1, 10_000)


def match_all(name: str, examples: Sequence[Example], chunks: int, tokens: int, seed: int) -> Task:
    """A task that scores the share of gold answers in an answer of at most `tokens` tokens."""
    return Task(name=f"{name}/{chunks}", metric="string_match_all", examples=examples, max_new_tokens=tokens, seed=seed)


def gathered(limit: int, context: Callable[[int], Sequence[Example]], *, patience: int, barren: str) -> list[Example]:
    """`limit` examples of contexts 0, 1, 2, …; raises UsageError(`barren`) after `patience` contexts without any."""
    examples: list[Example] = []
    number = last = 0
    while len(examples) < limit:
        found = context(number)[: limit - len(examples)]
        number += 1
        if found:
            examples += found
            last = number
        elif number - last == patience:
            raise UsageError(barren)
    return examples


def cut(items: Sequence[str], chunks: int) -> tuple[str, ...]:
    """Join `items` in order into `chunks` texts of nearly equally many items."""
    edges = [len(items) * at // chunks for at in range(chunks + 1)]
    return tuple(" ".join(items[left:right]) for left, right in pairwise(edges))


_WORLD_PATIENCE = 200  # consecutive worlds without a fitting question


def worlds(*, seed: int = 0, limit: int = 100, chunks: int = 8, split: Split = "heldout", kinds: str = "") -> Task:
    """Fictional worlds: a document per chunk, evidence among distractors of the same world; slices by kind of question.

    `kinds` selects the kinds, as in "one hop+two hops"; others are comparison, list (scored by the share that is given)
    and unanswerable. Every context is asked one question of each kind, about different facts, if its evidence fits into
    the chunks. Names of the `heldout` split occur in no training world.
    """
    require("chunks", chunks, 1, 1024)
    require("limit", limit, 1)
    wanted = [kind.strip() for kind in kinds.split("+") if kind.strip()]

    def context(number: int) -> list[Example]:
        world = World.generate(seed * 1_000_003 + number, split=split, size=max(24, chunks + 8))
        rng = random.Random(f"worlds:{seed}:{split}:{chunks}:{number}")
        return _world_context(rng, world, chunks, number, wanted)

    barren = f"worlds: no question of kind {kinds or 'any'} has its evidence in {chunks} chunks."
    examples = gathered(limit, context, patience=_WORLD_PATIENCE, barren=barren)
    return Task(name=f"worlds/{chunks}", metric="string_match_all", examples=examples, max_new_tokens=64, seed=seed)


def _world_context(rng: random.Random, world: World, chunks: int, number: int, wanted: Sequence[str]) -> list[Example]:
    """One question of each kind about one set of chunks in random order.

    Questions of one and two hops determine the documents; the other kinds are asked about the documents that result.
    """
    by_kind: dict[str, list[WorldQuestion]] = {}
    for question in world.questions:
        by_kind.setdefault(question.kind, []).append(question)
    hops = sorted(kind for kind in by_kind if not wanted or kind in wanted)
    turn = number % max(1, len(hops))  # the first kind has the most choice
    asked: list[WorldQuestion] = []
    titles: dict[str, None] = {}
    for kind in hops[turn:] + hops[:turn]:
        used = {sentence for question in asked for sentence in question.support}
        for question in rng.sample(by_kind[kind], len(by_kind[kind])):
            together = dict.fromkeys((*titles, *question.titles))
            if len(together) <= chunks and not used.intersection(question.support):
                asked.append(question)
                titles = together
                break
    rest = [document for document in world.documents if document.title not in titles]
    evidence = [world.document(title) for title in titles]
    chosen = evidence + rng.sample(rest, chunks - len(evidence))
    rng.shuffle(chosen)
    stated = world.stated([document.text for document in chosen])
    asked += [
        question
        for question in world.ask(rng, stated, 1)
        if question.kind not in by_kind and (not wanted or question.kind in wanted)
    ]
    texts = [f"# {document.title}\n\n{document.text}" for document in chosen]
    return [_example(question, texts, f"{number}-{place}") for place, question in enumerate(asked)]


def _example(question: WorldQuestion, texts: Sequence[str], name: str) -> Example:
    return Example(
        example_id=name,
        question=question.question,
        chunks=tuple(texts),
        answers=question.golds or (question.gold,),
        kind=question.kind,
        needed=tuple(at for at, text in enumerate(texts) if any(line in text for line in question.support)),
    )


_SENTENCES = 5  # most sentences per passage; with its heading about 60 tokens of the mini model
_CORE = 8  # related passages, which all questions of one hop, two hops and comparisons are about
_PASSAGE_PATIENCE = 40  # consecutive contexts without a question of the kind


def passages(
    *,
    seed: int = 0,
    limit: int = 100,
    chunks: int = 8,
    kind: QuestionKind = "one hop",
    pool: int = 0,
    per_context: int = 4,
    split: Split = "heldout",
) -> Task:
    """Questions of one `kind` about passages of a world, `per_context` of them for each context of `chunks` passages.

    The first 8 passages are related, so that chains and comparisons can be asked; the others are drawn from the same
    world. With the same `pool` (at least `chunks`), larger contexts contain the smaller ones, and the questions about
    the 8 passages are the same at every size. A list is scored by the share of its members that are named.
    """
    require("limit", limit, 1)
    require("per_context", per_context, 1)
    pool = pool or chunks
    require("pool", pool, chunks, 1024)
    require("chunks", chunks, 1, pool)
    examples = gathered(
        limit,
        lambda number: _passage_context(seed, number, chunks, kind, pool, per_context, split),
        patience=_PASSAGE_PATIENCE,
        barren=f"passages: no question of kind {kind} can be asked of {chunks} chunks; give more.",
    )
    metric = "string_match_all" if kind == "list" else "subspan_em"
    return Task(name=f"passages/{chunks}", metric=metric, examples=examples, max_new_tokens=64, seed=seed)


def _passage_context(
    seed: int, number: int, chunks: int, kind: QuestionKind, pool: int, per_context: int, split: Split
) -> list[Example]:
    world, texts = _pool(seed * 1_000_003 + number, pool, split)
    shown = list(texts[:chunks])
    # lists and unanswerable questions depend on all passages; the others are about the related ones alone, so that
    # they are the same at every size
    stated = world.stated(shown if kind in ("list", "unanswerable") else shown[:_CORE])
    asked = world.ask(random.Random(f"ask:{seed}:{number}:{kind}"), stated, per_context)
    random.Random(f"order:{seed}:{number}:{chunks}").shuffle(shown)
    of_kind = [question for question in asked if question.kind == kind]
    return [_example(question, shown, f"{number}-{place}") for place, question in enumerate(of_kind)]


@lru_cache(maxsize=64)
def _pool(seed: int, pool: int, split: Split) -> tuple[World, tuple[str, ...]]:
    """A world and `pool` of its passages, with those of related entities first."""
    world = World.generate(seed, split=split, size=max(24, pool))
    rng = random.Random(f"passages:{split}:{pool}:{seed}")
    titles = _related(rng, world)
    core = [text for title in titles for text in _cut(world.document(title))][:_CORE]
    others = [text for document in world.documents for text in _cut(document) if text not in core]
    return world, tuple(core + rng.sample(others, pool - len(core)) if pool > len(core) else core[:pool])


def _related(rng: random.Random, world: World) -> list[str]:
    """Titles of related documents: each names, or is named by, a document before it."""
    known = {document.title for document in world.documents}
    links: dict[str, list[str]] = {}
    for fact in world.facts:
        if fact.value in known:
            links.setdefault(fact.subject, []).append(fact.value)
            links.setdefault(fact.value, []).append(fact.subject)
    titles = [rng.choice([document.title for document in world.documents if document.title in links])]
    for title in titles:  # the list grows during the iteration
        near = [other for other in dict.fromkeys(links.get(title, ())) if other not in titles]
        titles += rng.sample(near, min(2, len(near)))
        if len(titles) >= _CORE:
            break
    return titles


def _cut(document: WorldDocument) -> list[str]:
    """The document cut into passages of nearly equal length, each with its heading."""
    texts = cut(document.sentences, -(-len(document.sentences) // _SENTENCES))
    return [f"# {document.title}\n\n{text}" for text in texts]


_LABELS = listed("brask dolin fenup garo hivel jumat kesto lorip mavun noxel pidra quern")
_PLACES = listed(
    "in the yard|by the road|near the river|behind the house|under the bridge|at the market|on the hill", "|"
)


def icl(*, seed: int = 0, limit: int = 100, chunks: int = 8, shots: int = 4, classes: int = 3) -> Task:
    """Many-shot learning: `shots` sentences per chunk with meaningless labels; the question is the label of a new one.

    The label depends on the kind of thing in the sentence. In the slice "seen" the thing is in a shot, so looking it up
    is enough. In "unseen" it is not, so the rule must be learned. With 0 `chunks` nothing is read.
    """
    require("limit", limit, 1)
    require("chunks", chunks, 0, 1024)
    require("shots", shots, 1, 1000)
    require("classes", classes, 2, len(GROUPS))
    examples = []
    for number in range(limit):
        rng = random.Random(f"icl:{seed}:{chunks}:{shots}:{number}")
        drawn = Shots(rng, count=chunks * shots, classes=classes, labels=_LABELS)
        seen = bool(drawn.shown) and number % 2 == 0
        group, thing = rng.choice(drawn.shown) if seen else drawn.fresh(rng)
        texts = drawn.chunks([neutral_sentence(rng, shown, _PLACES) for _, shown in drawn.shown], shots)
        examples.append(
            Example(
                example_id=str(number),
                question=shot_text(neutral_sentence(rng, thing, _PLACES)),
                chunks=tuple(texts),
                answers=(drawn.labels[group],),
                kind="seen" if seen else "unseen",
                needed=tuple(dict.fromkeys(at // shots for at, (_, shot) in enumerate(drawn.shown) if shot == thing)),
                classes=tuple(sorted(drawn.labels.values())),
            )
        )
    return Task(name=f"icl/{chunks}", metric="classification", examples=examples, max_new_tokens=32, seed=seed)


def variables(
    *,
    seed: int = 0,
    limit: int = 100,
    chunks: int = 8,
    words: int = 60,
    kind: Literal["value", "reference"] = "reference",
) -> Task:
    """What a variable stands for, in a list of nothing but variables.

    `kind` "value" asks for a line that contains the value itself, as in RULER's niah_multikey_3. "reference" is RULER's
    variable tracking: the line names an earlier variable, which gets another value later; the question asks for what it
    stood for at that line. Lists of both kinds are drawn alike.
    """
    require_sizes(limit, chunks, words)
    require("words", words, 4)  # each chunk has a line
    require("chunks x words", chunks * words, 120, 570)  # both kinds are there; names suffice
    examples = []
    for number in range(limit):
        rng = random.Random(f"variables:{kind}:{seed}:{chunks}:{words}:{number}")
        drawn = variable_list(rng, chunks * words // 2 - 1)
        line = rng.choice([each for each in drawn.known if each.refers == (kind == "reference")])
        examples.append(
            Example(
                example_id=str(number),
                question=asked(line.name),
                chunks=cut(drawn.texts(), chunks),
                answers=(line.value,),
                kind=kind,
            )
        )
    return match_all("variables", examples, chunks, 2, seed)


TASKS: Mapping[str, Callable[..., Task]] = {
    "worlds": worlds,
    "variables": variables,
    "icl": icl,
    "passages": passages,
}
"""Functions of `seed`, `limit` (examples), `chunks` (per example) and further keyword options."""


def make_task(spec: Spec, *, seed: int, limit: int, chunks: int) -> Task:
    """Make the task that `spec` names. Its options override the arguments. Raises UsageError for unknown ones."""
    if spec.name not in TASKS:
        raise UsageError(f"Unknown task {spec.name!r}; choose one of {', '.join(TASKS)}, or give a file.")
    function = TASKS[spec.name]
    hints = typing.get_type_hints(function)
    known = inspect.signature(function).parameters
    for key, value in spec.options.items():
        if key not in known:
            raise UsageError(f"Task {spec.name} has no option {key!r}; it has {', '.join(known)}.")
        if typing.get_origin(hint := hints[key]) is typing.Literal:
            if value not in typing.get_args(hint):
                choices = ", ".join(map(str, typing.get_args(hint)))
                raise UsageError(f"{key} of task {spec.name} must be one of {choices}, not {value!r}.")
        elif not isinstance(value, (int, float) if hint is float else hint) or (
            isinstance(value, bool) and hint is not bool
        ):
            raise UsageError(f"{key} of task {spec.name} must be of type {hint.__name__}, not {value!r}.")
    task = function(**{"seed": seed, "limit": limit, "chunks": chunks, **spec.options})
    return replace(task, name=f"{spec}/{spec.options.get('chunks', chunks)}") if spec.options else task
