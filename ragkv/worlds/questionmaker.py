"""Make questions about a world's facts: one hop, two hops, comparisons, lists, and unanswerable ones.

Whether a list is complete, and whether a question is unanswerable, depends on the context. So these are made from the
facts in a given context.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from ragkv.worlds.content import Fact, WorldQuestion
from ragkv.worlds.relation import CHAINS, RELATIONS, article

__all__ = ["UNANSWERABLE", "comparisons", "hop_questions", "lists", "unanswerable", "untold"]

UNANSWERABLE = "The documents do not say."
"""The right answer if the context does not contain the fact."""

_EARLIER: Mapping[str, tuple[tuple[str, ...], str]] = {
    "company.year": (
        ("Which was founded first, {a} or {b}?", "Which is older, {a} or {b}?"),
        "{w} was founded first.",
    ),
    "product.year": (
        ("Which was released first, {a} or {b}?", "Which came onto the market first, {a} or {b}?"),
        "{w} was released first.",
    ),
}
"""Questions whose answer is the entity with the smaller value."""

_SAME: Mapping[str, tuple[tuple[str, ...], str, str]] = {
    "company.town": (
        ("Are {a} and {b} based in the same town?", "Do {a} and {b} have their head office in the same town?"),
        "Both are in the same town.",
        "They are in different towns.",
    ),
    "person.birthplace": (
        ("Were {a} and {b} born in the same town?", "Do {a} and {b} come from the same town?"),
        "Both come from the same town.",
        "They come from different towns.",
    ),
    "person.profession": (
        ("Do {a} and {b} have the same profession?", "Did {a} and {b} train as the same?"),
        "Both have the same profession.",
        "They have different professions.",
    ),
    "person.instrument": (
        ("Do {a} and {b} play the same instrument?",),
        "Both play the same instrument.",
        "They play different instruments.",
    ),
}
"""Questions, the answer if the values are equal, and the answer if they differ."""

_LISTS: Mapping[str, tuple[str, ...]] = {
    "company.town": ("Which companies are based in {v}?", "Which companies have their head office in {v}?"),
    "person.birthplace": ("Who was born in {v}?", "Who comes from {v}?"),
    "person.profession": ("Who is a {v} by profession?", "Who trained as a {v}?"),
    "person.instrument": ("Who plays the {v}?", "Who is a lover of the {v}?"),
    "product.material": ("Which products are built from {v}?", "Which products have a body of {v}?"),
}

_INVERSE: Mapping[str, str] = {
    "company.founder": "person.founded",
    "company.chief": "person.leads",
    "company.product": "product.maker",
    "product.designer": "person.designed",
    "town.mayor": "person.mayor",
}
"""Inverse relations. A fact is unknown only if neither it nor its inverse is in the context."""


def hop_questions(facts: Sequence[Fact]) -> Iterator[WorldQuestion]:
    """Questions about every fact in every wording, then about every chain of two facts."""
    for fact in facts:
        for wording in RELATIONS[fact.relation].questions:
            yield WorldQuestion(
                question=wording.format(s=fact.subject),
                answer=fact.sentence,
                rephrased=fact.rephrased,
                gold=fact.value,
                hops=1,
                relation=fact.relation,
                titles=(fact.document,),
                support=(fact.sentence,),
            )
    by_key = {(fact.subject, fact.relation): fact for fact in facts}
    for first in facts:
        for (bridge, target), wordings in CHAINS.items():
            last = by_key.get((first.value, target)) if first.relation == bridge else None
            if last is None or last.value == first.subject:
                continue
            for wording in wordings:
                yield WorldQuestion(
                    question=wording.format(s=first.subject),
                    answer=f"{first.sentence} {last.sentence}",
                    rephrased=f"{first.rephrased} {last.rephrased}",
                    gold=last.value,
                    hops=2,
                    kind="two hops",
                    relation=f"{bridge}>{target}",
                    titles=(first.document, last.document),
                    support=(first.sentence, last.sentence),
                )


def comparisons(rng: random.Random, facts: Sequence[Fact], count: int) -> list[WorldQuestion]:
    """Up to `count` questions that compare two of `facts`; half of the same-or-different ones have equal values."""
    known: dict[str, list[Fact]] = defaultdict(list)
    for fact in facts:
        if fact.relation in _EARLIER or fact.relation in _SAME:
            known[fact.relation].append(fact)
    relations = [relation for relation, held in known.items() if len(held) > 1]
    found: dict[tuple[str, str, str], WorldQuestion] = {}
    for _ in range(4 * count if relations else 0):
        if len(found) == count:
            break
        relation = rng.choice(relations)
        first = rng.choice(known[relation])
        alike = relation in _SAME and rng.random() < 0.5
        others = [fact for fact in known[relation] if fact.subject != first.subject]
        others = [fact for fact in others if (fact.value == first.value) == alike]
        if others:
            second = rng.choice(others)
            found.setdefault((relation, first.subject, second.subject), _compare(rng, first, second))
    return list(found.values())


def _compare(rng: random.Random, first: Fact, second: Fact) -> WorldQuestion:
    if first.relation in _EARLIER:
        wordings, closing = _EARLIER[first.relation]
        closing = closing.format(w=min(first, second, key=lambda fact: int(fact.value)).subject)
    else:
        wordings, same, different = _SAME[first.relation]
        closing = same if first.value == second.value else different
    answer = f"{first.sentence} {second.sentence} {closing}"
    return WorldQuestion(
        question=rng.choice(wordings).format(a=first.subject, b=second.subject),
        answer=answer,
        rephrased=answer,
        gold=closing.rstrip("."),
        hops=2,
        relation=f"compare {first.relation}",
        titles=(first.document, second.document),
        support=(first.sentence, second.sentence),
        kind="comparison",
    )


def lists(facts: Sequence[Fact], *, most: int = 4) -> Iterator[WorldQuestion]:
    """Questions for all subjects with the same value, if `facts` (in reading order) have at most `most` of them."""
    groups: dict[tuple[str, str], list[Fact]] = defaultdict(list)
    for fact in facts:
        if fact.relation in _LISTS:
            groups[fact.relation, fact.value].append(fact)
    for (relation, value), held in groups.items():
        if len(held) > most:
            continue
        answer = " ".join(fact.sentence for fact in held)
        for wording in _LISTS[relation]:
            yield WorldQuestion(
                question=article(wording.format(v=value)),
                answer=answer,
                rephrased=answer,
                gold=held[0].subject,
                golds=tuple(fact.subject for fact in held),
                hops=1,
                relation=f"list {relation}",
                titles=tuple(fact.document for fact in held),
                support=tuple(fact.sentence for fact in held),
                kind="list",
            )


def untold(asked: Iterable[Fact], stated: Collection[Fact]) -> Iterator[Fact]:
    """The facts of `asked` that neither are in `stated` nor follow from it."""
    inverse = {**_INVERSE, **{other: relation for relation, other in _INVERSE.items()}}
    told = {(fact.relation, fact.subject) for fact in stated}
    told |= {(inverse[fact.relation], fact.value) for fact in stated if fact.relation in inverse}
    return (fact for fact in asked if (fact.relation, fact.subject) not in told)


def unanswerable(asked: Iterable[Fact], stated: Collection[Fact]) -> Iterator[WorldQuestion]:
    """Questions about every fact of `asked` that is `untold` by `stated`, and about chains that begin with one."""
    for fact in untold(asked, stated):
        wordings = list(RELATIONS[fact.relation].questions)
        for (bridge, _), chained in CHAINS.items():
            wordings += chained if bridge == fact.relation else ()
        for wording in wordings:
            yield WorldQuestion(
                question=wording.format(s=fact.subject),
                answer=UNANSWERABLE,
                rephrased=UNANSWERABLE,
                gold=UNANSWERABLE.removeprefix("The ").rstrip("."),
                hops=1,
                relation=fact.relation,
                titles=(),
                support=(),
                kind="unanswerable",
            )
