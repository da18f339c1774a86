"""Worlds: towns, companies, products and people with consistent relations, with documents and questions about them.

Names are invented and composed of syllables, so no model knows them. A stable hash assigns each name part to the split
`train` or `heldout`, so worlds of different splits share no name; values such as professions are common to both. Every
sentence names its entity in full, so a chunk is understandable wherever it is cut. Whether a list is complete or a
question unanswerable depends on the context, so these questions are made from the facts in a given context. A world is
determined by (seed, split, size).

Paraphrases ask without the words of the passage that answers them: they describe an entity by one or two of its facts
("the animal doctor who is good at the big brass slide"). The wordings are fixed tables, which a small model learns from
worlds of the training split; names and combinations of the held-out split are new to it.
"""

from __future__ import annotations

import hashlib
import random
import tomllib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

Split = Literal["train", "heldout"]
Kind = Literal["company", "product", "person", "town"]

HELDOUT_BUCKET = 0
"""Words whose hash is in this bucket of ten are held out."""


def listed(text: str, separator: str | None = None) -> tuple[str, ...]:
    """Split a list that is written as text."""
    return tuple(text.split(separator))


TABLES: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("tables.toml").read_text(encoding="utf-8"))
"""The words and sentences that worlds are made of."""
_NAMES = TABLES["names"]


def split_of(word: str) -> Split:
    """The split that a word belongs to, by a hash that is the same on every machine and version of Python."""
    digest = hashlib.blake2b(word.lower().encode(), digest_size=8).digest()
    return "heldout" if int.from_bytes(digest, "little") % 10 == HELDOUT_BUCKET else "train"


@cache
def _words(part: str, split: Split) -> tuple[str, ...]:
    """Every word of one kind (a key of `names.ends`) that belongs to `split`."""
    middles = _NAMES["middles"].split()
    middles = ["", *(middles[:4] if part in ("first", "river") else middles)]
    starts, ends = _NAMES["starts"].split(), _NAMES["ends"][part].split()
    words = {start + middle + end for start in starts for middle in middles for end in ends}
    return tuple(sorted(word for word in words if split_of(word) == split))


VALUES: Mapping[str, tuple[str, ...]] = {relation: tuple(values) for relation, values in TABLES["values"].items()}
"""By relation: the values that are common to both splits."""


@dataclass(frozen=True, slots=True)
class Relation:
    """Two wordings of a sentence and up to three of its question; `{s}` subject, `{v}` value."""

    sentences: list[str]
    questions: list[str]


RELATIONS = {name: Relation(**fields) for name, fields in TABLES["relations"].items()}

OPTIONAL = {
    "company.year", "company.staff", "person.instrument", "person.profession", "town.people", "town.region",
    "product.year", "product.material",
}  # fmt: skip
"""Facts that a document may leave out; the others carry the two-hop chains."""

CHAINS: Mapping[tuple[str, str], list[str]] = {
    (bridge, target): questions
    for chain, questions in TABLES["chains"].items()
    for bridge, _, target in [chain.partition(" > ")]
}
_EARLIER, _SAME, _LISTS = TABLES["earlier"], TABLES["same"], TABLES["lists"]


def article(sentence: str) -> str:
    """Write "an" before a vowel where a template says "a" ("as a engineer")."""
    words = sentence.split(" ")
    for index in range(len(words) - 1):
        if words[index] == "a" and words[index + 1][0] in "aeiou":
            words[index] = "an"
    return " ".join(words)


QuestionKind = Literal["one hop", "two hops", "comparison", "list", "unanswerable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A relation of an entity, and the only sentence that states it, in the document whose title is the `subject`.

    `rephrased` is the sentence in another wording, which no document contains.
    """

    relation: str
    subject: str
    value: str
    sentence: str
    rephrased: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldDocument:
    """The document about one entity. `text` is `sentences` joined by spaces."""

    title: str
    text: str
    kind: Kind
    sentences: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldQuestion:
    """A question with its answer in full sentences. `support` are the sentences that the answer restates, bridge first.

    `rephrased` is the answer in words that the documents do not use (not for comparisons and lists). A right answer
    contains `gold`, or for a list all of `golds`.
    """

    question: str
    answer: str
    rephrased: str
    gold: str
    hops: int
    relation: str
    titles: tuple[str, ...]
    support: tuple[str, ...]
    kind: QuestionKind = "one hop"
    golds: tuple[str, ...] = ()

    def right(self, answer: str) -> bool:
        """Whether `answer` contains every gold value, ignoring differences in white space."""
        found = " ".join(answer.split())
        return all(gold in found for gold in (self.golds or (self.gold,)))


UNANSWERABLE = "The documents do not say."
"""The right answer if the context does not contain the fact."""

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
    for about, wordings in _chains(facts):
        for wording in wordings:
            yield WorldQuestion(
                question=wording.format(s=about[0].subject),
                answer=" ".join(fact.sentence for fact in about),
                rephrased=" ".join(fact.rephrased for fact in about),
                gold=about[-1].value,
                hops=len(about),
                kind="one hop" if len(about) == 1 else "two hops",
                relation=">".join(fact.relation for fact in about),
                titles=tuple(fact.subject for fact in about),
                support=tuple(fact.sentence for fact in about),
            )


def _chains(facts: Sequence[Fact]) -> Iterator[tuple[tuple[Fact, ...], Sequence[str]]]:
    """Every fact, then every chain of two, with its wordings."""
    for fact in facts:
        yield (fact,), RELATIONS[fact.relation].questions
    by_key = {(fact.subject, fact.relation): fact for fact in facts}
    for first in facts:
        for (bridge, target), wordings in CHAINS.items():
            last = by_key.get((first.value, target)) if first.relation == bridge else None
            if last is not None and last.value != first.subject:
                yield (first, last), wordings


def comparisons(rng: random.Random, facts: Sequence[Fact], count: int) -> list[WorldQuestion]:
    """Up to `count` questions that compare two of `facts`; half of the same-or-different ones have equal values."""
    known: dict[str, list[Fact]] = defaultdict(list)
    for fact in facts:
        if fact.relation in _EARLIER or fact.relation in _SAME:
            known[fact.relation].append(fact)
    relations = [relation for relation, held in known.items() if len(held) > 1]
    by_pair: dict[tuple[str, str, str], WorldQuestion] = {}
    for _ in range(4 * count if relations else 0):
        if len(by_pair) == count:
            break
        relation = rng.choice(relations)
        first = rng.choice(known[relation])
        alike = relation in _SAME and rng.random() < 0.5
        others = [fact for fact in known[relation] if fact.subject != first.subject]
        others = [fact for fact in others if (fact.value == first.value) == alike]
        if others:
            second = rng.choice(others)
            by_pair.setdefault((relation, first.subject, second.subject), _compare(rng, first, second))
    return list(by_pair.values())


def _compare(rng: random.Random, first: Fact, second: Fact) -> WorldQuestion:
    if first.relation in _EARLIER:
        asked = _EARLIER[first.relation]
        closing = asked["answer"].format(w=min(first, second, key=lambda fact: int(fact.value)).subject)
    else:
        asked = _SAME[first.relation]
        closing = asked["equal" if first.value == second.value else "different"]
    answer = f"{first.sentence} {second.sentence} {closing}"
    return WorldQuestion(
        question=rng.choice(asked["questions"]).format(a=first.subject, b=second.subject),
        answer=answer,
        rephrased=answer,
        gold=closing.rstrip("."),
        hops=2,
        relation=f"compare {first.relation}",
        titles=(first.subject, second.subject),
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
                titles=tuple(fact.subject for fact in held),
                support=tuple(fact.sentence for fact in held),
                kind="list",
            )


def unstated(asked: Iterable[Fact], stated: Collection[Fact]) -> Iterator[Fact]:
    """The facts of `asked` that neither are in `stated` nor follow from it."""
    inverse = {**_INVERSE, **{other: relation for relation, other in _INVERSE.items()}}
    known = {(fact.relation, fact.subject) for fact in stated}
    known |= {(inverse[fact.relation], fact.value) for fact in stated if fact.relation in inverse}
    return (fact for fact in asked if (fact.relation, fact.subject) not in known)


def unanswerable(asked: Iterable[Fact], stated: Collection[Fact]) -> Iterator[WorldQuestion]:
    """Questions about every fact of `asked` that is not `stated`, and about chains that begin with one."""
    for fact in unstated(asked, stated):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Documents, and every question of one or two hops that they answer.

    `hidden` are facts that no document states, so questions about them cannot be answered. Comparisons, lists and
    unanswerable questions depend on the context that is read; `comparisons`, `lists` and `unanswerable` make them.
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
            own, omitted, sentences = _write(rng, title, kind, values[title])
            facts.extend(own)
            hidden.extend(omitted)
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
        return {document.title: document for document in self.documents}[title]

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
        drawn: list[WorldQuestion] = []
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
            drawn += list(fresh.values())[:per_kind]
        return drawn


def _populate(rng: random.Random, split: Split, size: int) -> tuple[dict[str, dict[str, str]], dict[str, Kind]]:
    """Draw the entities. Returns the relations by entity, and the kinds by entity in document order."""
    used: set[str] = set()

    def word(part: str) -> str:  # each is used once in a world
        while (drawn := rng.choice(_words(part, split))) in used:
            continue
        used.add(drawn)
        return drawn

    towns = [word("town") for _ in range(max(2, size // 5))]
    suffixes = _NAMES["company"].split()
    companies = [f"{word('company')} {rng.choice(suffixes)}" for _ in range(max(2, size // 4))]
    products = [word("product") for _ in companies]
    people = [f"{word('first')} {word('last')}" for _ in range(max(2, size - len(towns) - 2 * len(companies)))]
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
            "product.kind": rng.choice(VALUES["product.kind"]),
            "product.maker": company,
            "product.year": str(rng.randint(year, 2024)),
            "product.designer": designer,
            "product.material": rng.choice(VALUES["product.material"]),
        }
        values[founder].setdefault("person.founded", company)
        values[chief].setdefault("person.leads", company)
        values[designer].setdefault("person.designed", product)
    for town, mayor in zip(towns, mayors, strict=True):
        values[town] |= {
            "town.river": word("river"),
            "town.known": rng.choice(VALUES["town.known"]),
            "town.mayor": mayor,
            "town.region": word("region"),
            "town.people": str(rng.randint(12, 980) * 100),
        }
        values[mayor].setdefault("person.mayor", town)
    for person in people:
        values[person] |= {
            "person.birthplace": rng.choice(towns),
            "person.profession": rng.choice(VALUES["person.profession"]),
            "person.instrument": rng.choice(VALUES["person.instrument"]),
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
    omitted: list[Fact] = []
    while len(relations) > 4 and optional and (len(relations) > 7 or rng.random() < 0.2):
        left_out = optional.pop()
        relations.remove(left_out)
        omitted.append(_state(title, left_out, values[left_out], 0))
    rng.shuffle(relations)
    facts = [_state(title, relation, values[relation], rng.randrange(2)) for relation in relations]
    sentences = [fact.sentence for fact in facts]
    fillers = max(4 - len(sentences), int(len(sentences) < 7 and rng.random() < 0.6))
    for filler in rng.sample(TABLES["fillers"][kind], fillers):
        sentences.insert(rng.randint(0, len(sentences)), filler.format(s=title))
    return facts, omitted, sentences


def _state(subject: str, relation: str, value: str, wording: int) -> Fact:
    """State a fact in one of its two wordings."""
    texts = RELATIONS[relation].sentences[:: -1 if wording else 1]
    sentence, rephrased = (article(text.format(s=subject, v=value)) for text in texts)
    return Fact(relation=relation, subject=subject, value=value, sentence=sentence, rephrased=rephrased)


_DESCRIBED = TABLES["described"]
_STOP_WORDS = (
    "a an and as at by did does for from has have how in is it its of on that the their to was were what when where "
    "which who whose with"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Paraphrase:
    """A question that describes its entity. `title` is the only document of its world that answers it.

    `fact` is the sentence that answers it, `traits` are the sentences that identify the entity.
    """

    question: str
    title: str
    gold: str
    fact: str
    traits: tuple[str, ...]


def paraphrases(world: World, *, seed: int = 0, wordings: int = 2) -> tuple[Paraphrase, ...]:
    """Up to `wordings` questions about every askable fact of every entity that its traits identify."""
    rng = random.Random(f"ragkv-paraphrase:{world.split}:{world.seed}:{seed}")
    by_entity: dict[str, list[Fact]] = defaultdict(list)
    for fact in world.facts:
        by_entity[fact.subject].append(fact)
    having = Counter(traits for facts in by_entity.values() for traits in _subsets(facts))
    questions = []
    for facts in by_entity.values():
        for asked in facts:
            others = [fact for fact in facts if fact is not asked]
            choices = [traits for traits in _subsets(others) if having[traits] == 1]
            if asked.relation in _DESCRIBED["questions"] and choices:
                for _ in range(wordings):
                    traits = rng.choice(choices)
                    questions.append(
                        Paraphrase(
                            question=_ask(rng, asked.relation, traits),
                            title=asked.subject,
                            gold=asked.value,
                            fact=asked.sentence,
                            traits=tuple(f.sentence for f in facts if (f.relation, f.value) in traits),
                        )
                    )
    return tuple(dict.fromkeys(questions))


def shared_words(question: str, passage: str) -> int:
    """The number of words, without stop words, that a question shares with a passage."""
    return len(_spoken(question) & _spoken(passage))


def _spoken(text: str) -> set[str]:
    return {word for raw in text.lower().split() if (word := raw.strip(".,?!'#"))} - set(_STOP_WORDS.split())


Trait = tuple[str, str]


def _subsets(facts: Sequence[Fact]) -> Iterator[tuple[Trait, ...]]:
    """All single traits and pairs of traits for which there is a wording."""
    traits = sorted((fact.relation, fact.value) for fact in facts if fact.relation in TABLES["values"])
    for index, trait in enumerate(traits):
        yield (trait,)
        yield from ((trait, other) for other in traits[index + 1 :])


def _ask(rng: random.Random, relation: str, traits: Sequence[Trait]) -> str:
    noun = rng.choice(_DESCRIBED["nouns"][traits[0][0].split(".")[0]])
    clauses = []
    for trait, value in rng.sample(list(traits), len(traits)):
        frame = rng.choice(_DESCRIBED["frames"][trait])
        clauses.append(frame.format(w=rng.choice(TABLES["values"][trait][value])))
    question: str = rng.choice(_DESCRIBED["questions"][relation])
    return question.format(d=f"{noun} {' and '.join(clauses)}")
