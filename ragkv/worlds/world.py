"""A set of towns, companies, products and people with consistent relations, and the documents about them.

Every sentence names its entity in full, so that a chunk is understandable wherever it is cut. A world depends only on
(seed, split, size).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ragkv.worlds.content import Fact, WorldDocument, WorldQuestion
from ragkv.worlds.name import Kind, Names, Split
from ragkv.worlds.questionmaker import comparisons, hop_questions, lists, unanswerable
from ragkv.worlds.relation import FILLERS, OPTIONAL, RELATIONS, article
from ragkv.worlds.value import INSTRUMENTS, KINDS, KNOWN_FOR, MATERIALS, PROFESSIONS

__all__ = ["World"]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Documents, and every question of one or two hops that they answer.

    `hidden` are facts that no document states, so questions about them cannot be answered. Comparisons, lists and
    unanswerable questions depend on the context that is read; the functions of `questionmaker` make them from facts.
    """

    seed: int
    split: Split
    documents: tuple[WorldDocument, ...]
    facts: tuple[Fact, ...]
    hidden: tuple[Fact, ...]
    questions: tuple[WorldQuestion, ...]

    @classmethod
    def generate(cls, seed: int, *, split: Split = "train", size: int = 24) -> World:
        """Generate the world of `size` entities (at least 8) for `seed` and `split`."""
        if size < 8:
            raise ValueError(f"a world needs at least 8 entities, not {size}; pass size=8 or more")
        rng = random.Random(f"ragkv-world:{split}:{size}:{seed}")
        values, kinds = _populate(rng, split, size)
        documents: list[WorldDocument] = []
        facts: list[Fact] = []
        hidden: list[Fact] = []
        for title, kind in kinds.items():
            own, untold, sentences = _write(rng, title, kind, values[title])
            facts.extend(own)
            hidden.extend(untold)
            documents.append(
                WorldDocument(title=title, text=" ".join(sentences), kind=kind, sentences=tuple(sentences))
            )
        return cls(
            seed=seed,
            split=split,
            documents=tuple(documents),
            facts=tuple(facts),
            hidden=tuple(hidden),
            questions=tuple(hop_questions(facts)),
        )

    def document(self, title: str) -> WorldDocument:
        """The document of the entity `title`. Raises KeyError if there is none."""
        for document in self.documents:
            if document.title == title:
                return document
        raise KeyError(title)

    def stated(self, texts: Sequence[str]) -> list[Fact]:
        """The facts whose sentences are in `texts`, in reading order, ignoring line breaks."""
        joined = "\n\n".join(" ".join(text.split()) for text in texts)
        found = [(at, fact) for fact in self.facts if (at := joined.find(fact.sentence)) >= 0]
        return [fact for _, fact in sorted(found, key=lambda pair: pair[0])]

    def ask(self, rng: random.Random, stated: Sequence[Fact], per_kind: int) -> list[WorldQuestion]:
        """Draw up to `per_kind` questions of each kind for a reader of the facts `stated`, in reading order.

        Each question has one of its wordings. Unanswerable questions are about facts that are not in `stated`.
        """
        sentences = {fact.sentence for fact in stated}
        known = [question for question in self.questions if sentences.issuperset(question.support)]
        unknown = list(unanswerable((*self.facts, *self.hidden), stated))
        found: list[WorldQuestion] = []
        for pool in (
            [question for question in known if question.hops == 1],
            [question for question in known if question.hops == 2],
            comparisons(rng, stated, per_kind),
            list(lists(stated)),
            unknown,
        ):
            rng.shuffle(pool)
            fresh: dict[tuple[object, ...], WorldQuestion] = {}
            for question in pool:
                key = question.support or (question.relation, question.question)
                fresh.setdefault((question.relation, key), question)
            found += list(fresh.values())[:per_kind]
        return found


def _populate(rng: random.Random, split: Split, size: int) -> tuple[dict[str, dict[str, str]], dict[str, Kind]]:
    """Draw the entities. Returns the relations by entity, and the kinds by entity in document order."""
    names = Names(rng, split)
    towns = [names.name("town") for _ in range(max(2, size // 5))]
    companies = [names.name("company") for _ in range(max(2, size // 4))]
    products = [names.name("product") for _ in companies]
    people = [names.name("person") for _ in range(max(2, size - len(towns) - 2 * len(companies)))]
    values: dict[str, dict[str, str]] = {name: {} for name in (*companies, *products, *people, *towns)}

    def holders(count: int) -> list[str]:  # distinct people hold a role, so that its inverse is a fact too
        return rng.sample(people, count) if count <= len(people) else people + rng.sample(people, count - len(people))

    founders, chiefs = holders(len(companies)), holders(len(companies))
    designers, mayors = holders(len(products)), holders(len(towns))
    for company, product, founder, chief, designer in zip(
        companies, products, founders, chiefs, designers, strict=True
    ):
        year = rng.randint(1850, 1999)
        values[company] |= {
            "company.town": rng.choice(towns),
            "company.founder": founder,
            "company.year": str(year),
            "company.product": product,
            "company.chief": chief,
            "company.staff": str(rng.randint(12, 999)),
        }
        values[product] |= {
            "product.kind": rng.choice(KINDS),
            "product.maker": company,
            "product.year": str(rng.randint(year, 2024)),
            "product.designer": designer,
            "product.material": rng.choice(MATERIALS),
        }
        values[founder].setdefault("person.founded", company)
        values[chief].setdefault("person.leads", company)
        values[designer].setdefault("person.designed", product)
    for town, mayor in zip(towns, mayors, strict=True):
        values[town] |= {
            "town.river": names.word("river"),
            "town.known": rng.choice(KNOWN_FOR),
            "town.mayor": mayor,
            "town.region": names.word("region"),
            "town.people": str(rng.randint(12, 980) * 100),
        }
        values[mayor].setdefault("person.mayor", town)
    for person in people:
        values[person] |= {
            "person.birthplace": rng.choice(towns),
            "person.profession": rng.choice(PROFESSIONS),
            "person.instrument": rng.choice(INSTRUMENTS),
        }
    kinds: dict[str, Kind] = {}
    for kind, members in (("company", companies), ("product", products), ("person", people), ("town", towns)):
        for member in members:
            kinds[member] = kind  # type: ignore[assignment]
    return values, kinds


def _write(
    rng: random.Random, title: str, kind: Kind, values: Mapping[str, str]
) -> tuple[list[Fact], list[Fact], list[str]]:
    """Write an entity's document of four to seven sentences: its facts, the facts left out, the sentences."""
    relations = list(values)
    optional = [relation for relation in relations if relation in OPTIONAL]
    rng.shuffle(optional)
    untold: list[Fact] = []
    while len(relations) > 4 and optional and (len(relations) > 7 or rng.random() < 0.2):
        left_out = optional.pop()
        relations.remove(left_out)
        untold.append(_state(title, left_out, values[left_out], 0))
    rng.shuffle(relations)
    facts = [_state(title, relation, values[relation], rng.randrange(2)) for relation in relations]
    sentences = [fact.sentence for fact in facts]
    fillers = max(4 - len(sentences), int(len(sentences) < 7 and rng.random() < 0.6))
    for filler in rng.sample(FILLERS[kind], fillers):
        sentences.insert(rng.randint(0, len(sentences)), filler.format(s=title))
    return facts, untold, sentences


def _state(subject: str, relation: str, value: str, wording: int) -> Fact:
    """State a fact in one of its two wordings."""
    told, other = RELATIONS[relation].sentences[:: -1 if wording else 1]
    sentence, rephrased = (article(text.format(s=subject, v=value)) for text in (told, other))
    return Fact(
        relation=relation, subject=subject, value=value, sentence=sentence, rephrased=rephrased, document=subject
    )
