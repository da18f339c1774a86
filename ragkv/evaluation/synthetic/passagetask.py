"""Questions of every kind about passages of fictional worlds, with several questions per context."""

from __future__ import annotations

import random
from functools import lru_cache
from itertools import pairwise

from ragkv.evaluation.example import Example, Task
from ragkv.evaluation.synthetic.wording import gathered, require
from ragkv.worlds import QuestionKind, Split, World, WorldDocument

__all__ = ["passages"]

_SENTENCES = 5  # most sentences per passage; with its heading about 60 tokens of the mini model
_CORE = 8  # related passages, which all questions of one hop, two hops and comparisons are about
_PATIENCE = 40  # consecutive contexts without a question of the kind


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
        lambda number: _context(seed, number, chunks, kind, pool, per_context, split),
        patience=_PATIENCE,
        barren=f"passages: no question of kind {kind} can be asked of {chunks} chunks; give more.",
    )
    metric = "string_match_all" if kind == "list" else "subspan_em"
    return Task(name=f"passages/{chunks}", metric=metric, examples=examples, max_new_tokens=64, seed=seed)


def _context(
    seed: int, number: int, chunks: int, kind: QuestionKind, pool: int, per_context: int, split: Split
) -> list[Example]:
    world, texts = _pool(seed * 1_000_003 + number, pool, split)
    shown = list(texts[:chunks])
    # lists and unanswerable questions depend on all passages; the others are about the related ones alone, so that
    # they are the same at every size
    stated = world.stated(shown if kind in ("list", "unanswerable") else shown[:_CORE])
    asked = world.ask(random.Random(f"ask:{seed}:{number}:{kind}"), stated, per_context)
    random.Random(f"order:{seed}:{number}:{chunks}").shuffle(shown)
    return [
        Example(
            example_id=f"{number}-{place}",
            question=question.question,
            chunks=tuple(shown),
            answers=question.golds or (question.gold,),
            kind=kind,
            needed=tuple(at for at, text in enumerate(shown) if any(line in text for line in question.support)),
        )
        for place, question in enumerate(each for each in asked if each.kind == kind)
    ]


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
    found = [rng.choice([document.title for document in world.documents if document.title in links])]
    for title in found:  # the list grows during the iteration
        near = [other for other in dict.fromkeys(links.get(title, ())) if other not in found]
        found += rng.sample(near, min(2, len(near)))
        if len(found) >= _CORE:
            break
    return found


def _cut(document: WorldDocument) -> list[str]:
    """The document cut into passages of nearly equal length, each with its heading."""
    count = -(-len(document.sentences) // _SENTENCES)
    edges = [len(document.sentences) * at // count for at in range(count + 1)]
    return [f"# {document.title}\n\n{' '.join(document.sentences[left:right])}" for left, right in pairwise(edges)]
