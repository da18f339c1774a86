"""Questions about fictional worlds, with evidence among distractors of the same world and names no model has seen."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ragkv.evaluation.example import Example, Task
from ragkv.evaluation.synthetic.wording import gathered, require
from ragkv.worlds import Split, World, WorldDocument, WorldQuestion

__all__ = ["worlds"]

_PATIENCE = 200  # consecutive worlds without a fitting question


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
        return _context(rng, world, chunks, number, wanted)

    barren = f"worlds: no question of kind {kinds or 'any'} has its evidence in {chunks} chunks."
    examples = gathered(limit, context, patience=_PATIENCE, barren=barren)
    return Task(name=f"worlds/{chunks}", metric="string_match_all", examples=examples, max_new_tokens=64, seed=seed)


def _context(rng: random.Random, world: World, chunks: int, number: int, wanted: Sequence[str]) -> list[Example]:
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
    return [_example(question, chosen, f"{number}-{place}") for place, question in enumerate(asked)]


def _example(question: WorldQuestion, chosen: Sequence[WorldDocument], name: str) -> Example:
    return Example(
        example_id=name,
        question=question.question,
        chunks=tuple(f"# {document.title}\n\n{document.text}" for document in chosen),
        answers=question.golds or (question.gold,),
        kind=question.kind,
        needed=tuple(
            at
            for at, document in enumerate(chosen)
            if any(sentence in document.sentences for sentence in question.support)
        ),
    )
