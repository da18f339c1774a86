"""Worlds: towns, companies, products and people with consistent relations, with documents and questions about them.

Names are invented and composed of syllables, so no model knows them. A stable hash assigns each name part to the split
`train` or `heldout`, so worlds of different splits share no name; values such as professions are common to both. Every
sentence names its entity in full, so a chunk is understandable wherever it is cut. Whether a list is complete or a
question unanswerable depends on the context, so these questions are made from the facts in a given context. A world is
determined by (seed, split, size).
"""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

Split = Literal["train", "heldout"]
Kind = Literal["company", "product", "person", "town"]

HELDOUT_BUCKET = 0
"""Words whose hash is in this bucket of ten are held out."""


def listed(text: str, separator: str | None = None) -> tuple[str, ...]:
    """Split a list that is written as text."""
    return tuple(text.split(separator))


_STARTS = listed(
    "Al An Ar As Bal Bar Bel Ben Ber Bor Bran Bre Cal Cam Car Cas Cor Cul Dal Dan Dar Del Dor Dun Ed El Em Er Fal "
    "Far Fel Fen Fin For Gal Gar Gil Gor Gra Hal Han Har Hel Hol Il In Is Jar Jen Jor Kal Kar Kel Ken Kir Kol Lam "
    "Lan Lar Len Lin Lor Mal Mar Mel Mer Min Mor Nal Nar Nel Nor Ol Or Os Pal Par Pel Per Por Quin Ral Ran Rel Ren "
    "Ros Sal San Sel Sor Sul Tal Tam Tar Tel Tor Tul Ul Ur Val Var Vel Ven Vor Wal Wen Wil Yar Yel Zan Zel Zor"
)
_MIDDLES = listed("a e i o an en in on ar er ol il ad os am et")
_ENDS: Mapping[str, Sequence[str]] = {
    "first": listed("a ia ina ek io is ra la na on ro do mi sa en ette us ko da ric win bert ya ly mond lo"),
    "last": listed(
        "kel man sen berg strom ski dal vik nik mann quist field wood stone ter ler ner lund zar dek rick gard"
    ),
    "town": listed("by ford wick mere ton ham burgh holm stead dale port bridge haven brook cliff gate hurst minster"),
    "company": listed("den tek dyne mont cor tan vex lex nova via sol tra max phor gen dra bix lith quor zon"),
    "product": listed("vane bex tix mio dora ska lume rix pod zia flex nia trix jet lux dex quo bri wing pax"),
    "river": listed("der ne we ster th ven low wash run gle ble ver se bourn sk re"),
    "region": listed("land shire mark wald ria nia marsh moor vale fell"),
}
_COMPANY_WORDS = listed(
    "Works Labs Motors Foods Glass Press Mills Tools Systems Textiles Instruments Shipyards Ceramics Paper Clocks "
    "Optics Brewery Furniture Pumps Robotics"
)


def split_of(word: str) -> Split:
    """The split that a word belongs to, by a hash that is the same on every machine and version of Python."""
    digest = hashlib.blake2b(word.lower().encode(), digest_size=8).digest()
    return "heldout" if int.from_bytes(digest, "little") % 10 == HELDOUT_BUCKET else "train"


@cache
def _words(part: str, split: Split) -> tuple[str, ...]:
    """Every word of one kind (a key of `_ENDS`) that belongs to `split`."""
    middles = ("", *_MIDDLES) if part not in ("first", "river") else ("", *_MIDDLES[:4])
    words = {start + middle + end for start in _STARTS for middle in middles for end in _ENDS[part]}
    return tuple(sorted(word for word in words if split_of(word) == split))


class Names:
    """Draws names that are unique in a world; each word is used once per kind."""

    def __init__(self, rng: random.Random, split: Split) -> None:
        self._rng = rng
        self._split: Split = split
        self._used: set[str] = set()

    def word(self, part: str) -> str:
        words = _words(part, self._split)
        while True:
            word = self._rng.choice(words)
            if word not in self._used:
                self._used.add(word)
                return word

    def name(self, kind: Kind) -> str:
        if kind == "person":
            return f"{self.word('first')} {self.word('last')}"
        if kind == "company":
            return f"{self.word('company')} {self._rng.choice(_COMPANY_WORDS)}"
        return self.word(kind)


PROFESSIONS = listed(
    "chemist|engineer|architect|geologist|physician|clockmaker|botanist|lawyer|teacher|carpenter|pilot|surveyor|"
    "economist|historian|mathematician|glassblower|baker|journalist|translator|biologist|blacksmith|librarian|"
    "astronomer|tailor|sailor|nurse|potter|veterinarian|photographer|printer|dentist|welder",
    "|",
)
INSTRUMENTS = listed(
    "cello|violin|flute|piano|accordion|trumpet|harp|oboe|guitar|clarinet|mandolin|banjo|drums|organ|viola|bassoon|"
    "saxophone|lute|trombone|zither",
    "|",
)
KINDS = listed(
    "folding bicycle|desk lamp|water pump|camping stove|pocket radio|coffee grinder|sewing machine|rain coat|"
    "fishing reel|hand drill|wall clock|microscope|garden tractor|electric kettle|snow blower|bread oven|"
    "pressure gauge|sailing boat|reading chair|typewriter|hearing aid|milk separator|weather station|cable winch|"
    "tea set|paper cutter|road roller|wheel loader|air compressor|film camera|cargo trailer|barometer",
    "|",
)
MATERIALS = listed(
    "brass|oak|aluminium|copper|bamboo|steel|leather|walnut|cork|glass|titanium|cast iron|ash wood|bronze|linen|"
    "carbon fibre|pine|zinc|stoneware|maple",
    "|",
)
KNOWN_FOR = listed(
    "smoked trout|iron bridge|lavender fields|salt mines|blue pottery|stone lighthouse|cherry orchards|paper mills|"
    "winter market|old observatory|apple cider|wool carpets|glass museum|goat cheese|clock tower|thermal baths|"
    "honey cakes|botanical garden|puppet theatre|copper roofs|walnut bread|ferry festival|rose gardens|silk weavers|"
    "slate quarries|chess tournament|horse fair|pepper sauce|wooden churches|kite festival",
    "|",
)


@dataclass(frozen=True, slots=True)
class Relation:
    """Two wordings of a sentence and up to three of its question; `{s}` subject, `{v}` value."""

    sentences: tuple[str, str]
    questions: tuple[str, ...]


RELATIONS: Mapping[str, Relation] = {
    "company.town": Relation(
        ("{s} is based in {v}.", "{s} has its head office in {v}."),
        ("Where is {s} based?", "In which town is {s} based?", "Where does {s} have its head office?"),
    ),
    "company.founder": Relation(
        ("{s} was founded by {v}.", "{s} was started by {v}."),
        ("Who founded {s}?", "Who started {s}?", "By whom was {s} founded?"),
    ),
    "company.year": Relation(
        ("{s} was founded in {v}.", "{s} was set up in the year {v}."),
        ("In which year was {s} founded?", "When was {s} founded?", "When was {s} set up?"),
    ),
    "company.product": Relation(
        ("{s} makes the {v}.", "{s} is the maker of the {v}."),
        ("What does {s} make?", "Which product does {s} make?", "What is {s} the maker of?"),
    ),
    "company.chief": Relation(
        ("{s} is led by {v}.", "{s} has {v} as chief executive."),
        ("Who leads {s}?", "Who is the chief executive of {s}?", "By whom is {s} led?"),
    ),
    "company.staff": Relation(
        ("{s} employs {v} people.", "{s} has a staff of {v}."),
        ("How many people does {s} employ?", "How many people work at {s}?", "How large is the staff of {s}?"),
    ),
    "person.birthplace": Relation(
        ("{s} was born in {v}.", "{s} comes from {v}."),
        ("Where was {s} born?", "In which town was {s} born?", "Where does {s} come from?"),
    ),
    "person.profession": Relation(
        ("{s} trained as a {v}.", "{s} is a {v} by profession."),
        ("What did {s} train as?", "What is the profession of {s}?", "What is {s} by profession?"),
    ),
    "person.instrument": Relation(
        ("{s} plays the {v}.", "{s} is a lover of the {v}."),
        ("Which instrument does {s} play?", "What does {s} play?"),
    ),
    "person.founded": Relation(
        ("{s} is the founder of {v}.", "{s} founded {v}."),
        ("Which company did {s} found?", "What is {s} the founder of?"),
    ),
    "person.leads": Relation(
        ("{s} is the chief executive of {v}.", "{s} leads {v}."),
        ("Which company does {s} lead?", "Of which company is {s} the chief executive?"),
    ),
    "person.designed": Relation(
        ("{s} is the designer of the {v}.", "{s} designed the {v}."),
        ("Which product did {s} design?", "What is {s} the designer of?"),
    ),
    "person.mayor": Relation(
        ("{s} is the mayor of {v}.", "{s} serves as mayor of {v}."),
        ("Of which town is {s} the mayor?", "Where does {s} serve as mayor?"),
    ),
    "town.river": Relation(
        ("{s} lies on the river {v}.", "{s} stands on the banks of the {v}."),
        ("On which river does {s} lie?", "Which river flows through {s}?", "Which river does {s} stand on?"),
    ),
    "town.known": Relation(
        ("{s} is known for its {v}.", "{s} is famous for its {v}."),
        ("What is {s} known for?", "What is {s} famous for?"),
    ),
    "town.mayor": Relation(
        ("{s} has {v} as mayor.", "{s} is governed by {v}."),
        ("Who is the mayor of {s}?", "Who governs {s}?"),
    ),
    "town.region": Relation(
        ("{s} belongs to the region of {v}.", "{s} is a town in {v}."),
        ("To which region does {s} belong?", "In which region is {s}?"),
    ),
    "town.people": Relation(
        ("{s} has {v} inhabitants.", "{s} is home to {v} people."),
        ("How many inhabitants does {s} have?", "How many people live in {s}?"),
    ),
    "product.kind": Relation(
        ("{s} is a kind of {v}.", "{s} is sold as a {v}."),
        ("What kind of product is {s}?", "What is {s} sold as?"),
    ),
    "product.maker": Relation(
        ("{s} is made by {v}.", "{s} is a product of {v}."),
        ("Who makes {s}?", "Which company makes {s}?", "By which company is {s} made?"),
    ),
    "product.year": Relation(
        ("{s} was released in {v}.", "{s} came onto the market in {v}."),
        ("In which year was {s} released?", "When was {s} released?", "When did {s} come onto the market?"),
    ),
    "product.designer": Relation(
        ("{s} was designed by {v}.", "{s} was drawn up by {v}."),
        ("Who designed {s}?", "By whom was {s} designed?", "Who drew up {s}?"),
    ),
    "product.material": Relation(
        ("{s} is built from {v}.", "{s} has a body of {v}."),
        ("What is {s} built from?", "Which material is {s} built from?"),
    ),
}

OPTIONAL = {
    "company.year", "company.staff", "person.instrument", "person.profession", "town.people", "town.region",
    "product.year", "product.material",
}  # fmt: skip
"""Facts that a document may leave out; the others carry the two-hop chains."""

CHAINS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("company.founder", "person.birthplace"): (
        "In which town was the founder of {s} born?",
        "Where was the founder of {s} born?",
    ),
    ("company.founder", "person.profession"): (
        "What is the profession of the founder of {s}?",
        "What did the founder of {s} train as?",
    ),
    ("company.chief", "person.birthplace"): (
        "In which town was the chief executive of {s} born?",
        "Where was the chief executive of {s} born?",
    ),
    ("company.chief", "person.profession"): ("What did the chief executive of {s} train as?",),
    ("company.town", "town.river"): (
        "On which river lies the town where {s} is based?",
        "Which river flows through the town where {s} is based?",
    ),
    ("company.town", "town.mayor"): ("Who is the mayor of the town where {s} is based?",),
    ("company.town", "town.known"): ("What is the town where {s} is based known for?",),
    ("company.product", "product.designer"): ("Who designed the product that {s} makes?",),
    ("product.maker", "company.town"): (
        "In which town is the maker of {s} based?",
        "Where is the company that makes {s} based?",
    ),
    ("product.maker", "company.founder"): (
        "Who founded the maker of {s}?",
        "Who founded the company that makes {s}?",
    ),
    ("product.designer", "person.birthplace"): (
        "In which town was the designer of {s} born?",
        "Where was the designer of {s} born?",
    ),
    ("town.mayor", "person.profession"): ("What did the mayor of {s} train as?",),
    ("town.mayor", "person.birthplace"): ("Where was the mayor of {s} born?",),
    ("person.birthplace", "town.river"): ("On which river lies the town where {s} was born?",),
    ("person.founded", "company.town"): ("Where is the company that {s} founded based?",),
}

FILLERS: Mapping[Kind, Sequence[str]] = {
    "company": (
        "{s} opens its doors to visitors once a year.",
        "{s} keeps a small museum beside its office.",
        "{s} trains young people from the whole area.",
        "{s} is often mentioned in the local newspaper.",
        "{s} moved to a larger building some time ago.",
        "{s} has a long tradition of careful work.",
    ),
    "product": (
        "{s} can be found in many homes.",
        "{s} is easy to repair with simple tools.",
        "{s} comes with a printed manual.",
        "{s} won a prize at the national fair.",
        "{s} is sold in three sizes.",
    ),
    "person": (
        "{s} likes long walks in the hills.",
        "{s} wrote a short book about early years.",
        "{s} gives a talk every spring.",
        "{s} is a friendly guest at local fairs.",
        "{s} collects old maps and letters.",
    ),
    "town": (
        "{s} is a quiet place in winter.",
        "{s} has a railway station and two schools.",
        "{s} welcomes many visitors in summer.",
        "{s} was rebuilt after a great fire.",
        "{s} has a market on every Saturday.",
    ),
}


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
    """A relation of an entity, and the only sentence that states it, in the document with the title `document`.

    `rephrased` is the sentence in another wording, which no document contains.
    """

    relation: str
    subject: str
    value: str
    sentence: str
    rephrased: str
    document: str


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


def unstated(asked: Iterable[Fact], stated: Collection[Fact]) -> Iterator[Fact]:
    """The facts of `asked` that neither are in `stated` nor follow from it."""
    inverse = {**_INVERSE, **{other: relation for relation, other in _INVERSE.items()}}
    result = {(fact.relation, fact.subject) for fact in stated}
    result |= {(inverse[fact.relation], fact.value) for fact in stated if fact.relation in inverse}
    return (fact for fact in asked if (fact.relation, fact.subject) not in result)


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
    omitted: list[Fact] = []
    while len(relations) > 4 and optional and (len(relations) > 7 or rng.random() < 0.2):
        left_out = optional.pop()
        relations.remove(left_out)
        omitted.append(_state(title, left_out, values[left_out], 0))
    rng.shuffle(relations)
    facts = [_state(title, relation, values[relation], rng.randrange(2)) for relation in relations]
    sentences = [fact.sentence for fact in facts]
    fillers = max(4 - len(sentences), int(len(sentences) < 7 and rng.random() < 0.6))
    for filler in rng.sample(FILLERS[kind], fillers):
        sentences.insert(rng.randint(0, len(sentences)), filler.format(s=title))
    return facts, omitted, sentences


def _state(subject: str, relation: str, value: str, wording: int) -> Fact:
    """State a fact in one of its two wordings."""
    result, other = RELATIONS[relation].sentences[:: -1 if wording else 1]
    sentence, rephrased = (article(text.format(s=subject, v=value)) for text in (result, other))
    return Fact(
        relation=relation, subject=subject, value=value, sentence=sentence, rephrased=rephrased, document=subject
    )
