"""Fictional worlds: documents whose facts no model can know, so that an answer proves that the context was read.

A world is a closed set of towns, companies, products and people with consistent relations. Every sentence names its
entity in full, so that a chunk cut anywhere still stands alone. Everything is a pure function of (seed, split, size).
Names are composed from syllables; a stable hash of every composed word decides whether it belongs to the `train` or
the `heldout` split, so that worlds of different splits share no name at all, not even a surname.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

__all__ = ["Fact", "Split", "World", "WorldDocument", "WorldQuestion", "split_of"]

Split = Literal["train", "heldout"]
Kind = Literal["company", "product", "person", "town"]

HELDOUT_BUCKET = 0
"""Words whose hash falls into this bucket of ten are held out."""


def _listed(text: str, separator: str | None = None) -> tuple[str, ...]:
    """Split a table that is written as text."""
    return tuple(text.split(separator))


_STARTS = _listed(
    "Al An Ar As Bal Bar Bel Ben Ber Bor Bran Bre Cal Cam Car Cas Cor Cul Dal Dan Dar Del Dor Dun Ed El Em Er Fal "
    "Far Fel Fen Fin For Gal Gar Gil Gor Gra Hal Han Har Hel Hol Il In Is Jar Jen Jor Kal Kar Kel Ken Kir Kol Lam "
    "Lan Lar Len Lin Lor Mal Mar Mel Mer Min Mor Nal Nar Nel Nor Ol Or Os Pal Par Pel Per Por Quin Ral Ran Rel Ren "
    "Ros Sal San Sel Sor Sul Tal Tam Tar Tel Tor Tul Ul Ur Val Var Vel Ven Vor Wal Wen Wil Yar Yel Zan Zel Zor"
)
_MIDDLES = _listed("a e i o an en in on ar er ol il ad os am et")
_ENDS: Mapping[str, Sequence[str]] = {
    "first": _listed("a ia ina ek io is ra la na on ro do mi sa en ette us ko da ric win bert ya ly mond lo"),
    "last": _listed(
        "kel man sen berg strom ski dal vik nik mann quist field wood stone ter ler ner lund zar dek rick gard"
    ),
    "town": _listed("by ford wick mere ton ham burgh holm stead dale port bridge haven brook cliff gate hurst minster"),
    "company": _listed("den tek dyne mont cor tan vex lex nova via sol tra max phor gen dra bix lith quor zon"),
    "product": _listed("vane bex tix mio dora ska lume rix pod zia flex nia trix jet lux dex quo bri wing pax"),
    "river": _listed("der ne we ster th ven low wash run gle ble ver se bourn sk re"),
    "region": _listed("land shire mark wald ria nia marsh moor vale fell"),
}
_COMPANY_WORDS = _listed(
    "Works Labs Motors Foods Glass Press Mills Tools Systems Textiles Instruments Shipyards Ceramics Paper Clocks "
    "Optics Brewery Furniture Pumps Robotics"
)
_PROFESSIONS = _listed(
    "chemist|engineer|architect|geologist|physician|clockmaker|botanist|lawyer|teacher|carpenter|pilot|surveyor|"
    "economist|historian|mathematician|glassblower|baker|journalist|translator|biologist|blacksmith|librarian|"
    "astronomer|tailor|sailor|nurse|potter|veterinarian|photographer|printer|dentist|welder",
    "|",
)
_INSTRUMENTS = _listed(
    "cello|violin|flute|piano|accordion|trumpet|harp|oboe|guitar|clarinet|mandolin|banjo|drums|organ|viola|bassoon|"
    "saxophone|lute|trombone|zither",
    "|",
)
_KINDS = _listed(
    "folding bicycle|desk lamp|water pump|camping stove|pocket radio|coffee grinder|sewing machine|rain coat|"
    "fishing reel|hand drill|wall clock|microscope|garden tractor|electric kettle|snow blower|bread oven|"
    "pressure gauge|sailing boat|reading chair|typewriter|hearing aid|milk separator|weather station|cable winch|"
    "tea set|paper cutter|road roller|wheel loader|air compressor|film camera|cargo trailer|barometer",
    "|",
)
_MATERIALS = _listed(
    "brass|oak|aluminium|copper|bamboo|steel|leather|walnut|cork|glass|titanium|cast iron|ash wood|bronze|linen|"
    "carbon fibre|pine|zinc|stoneware|maple",
    "|",
)
_KNOWN_FOR = _listed(
    "smoked trout|iron bridge|lavender fields|salt mines|blue pottery|stone lighthouse|cherry orchards|paper mills|"
    "winter market|old observatory|apple cider|wool carpets|glass museum|goat cheese|clock tower|thermal baths|"
    "honey cakes|botanical garden|puppet theatre|copper roofs|walnut bread|ferry festival|rose gardens|silk weavers|"
    "slate quarries|chess tournament|horse fair|pepper sauce|wooden churches|kite festival",
    "|",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One relation of one entity and the one sentence that states it; `document` is the title where it stands.

    `rephrased` is the sentence in the other wording, which stands nowhere in the world.
    """

    relation: str
    subject: str
    value: str
    sentence: str
    rephrased: str
    document: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldDocument:
    """All that the world's documents say of one entity: `text` is `sentences` joined by spaces."""

    title: str
    text: str
    kind: Kind
    sentences: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldQuestion:
    """A question with its full-sentence answer; `support` are the sentences that it restates, bridge first.

    `rephrased` is the answer in words that the documents do not use.
    """

    question: str
    answer: str
    rephrased: str
    gold: str
    hops: int
    relation: str
    titles: tuple[str, ...]
    support: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Relation:
    """Two wordings of a sentence and up to three of its question; `{s}` subject, `{v}` value."""

    sentences: tuple[str, str]
    questions: tuple[str, ...]


_RELATIONS: Mapping[str, _Relation] = {
    "company.town": _Relation(
        ("{s} is based in {v}.", "{s} has its head office in {v}."),
        ("Where is {s} based?", "In which town is {s} based?", "Where does {s} have its head office?"),
    ),
    "company.founder": _Relation(
        ("{s} was founded by {v}.", "{s} was started by {v}."),
        ("Who founded {s}?", "Who started {s}?", "By whom was {s} founded?"),
    ),
    "company.year": _Relation(
        ("{s} was founded in {v}.", "{s} was set up in the year {v}."),
        ("In which year was {s} founded?", "When was {s} founded?", "When was {s} set up?"),
    ),
    "company.product": _Relation(
        ("{s} makes the {v}.", "{s} is the maker of the {v}."),
        ("What does {s} make?", "Which product does {s} make?", "What is {s} the maker of?"),
    ),
    "company.chief": _Relation(
        ("{s} is led by {v}.", "{s} has {v} as chief executive."),
        ("Who leads {s}?", "Who is the chief executive of {s}?", "By whom is {s} led?"),
    ),
    "company.staff": _Relation(
        ("{s} employs {v} people.", "{s} has a staff of {v}."),
        ("How many people does {s} employ?", "How many people work at {s}?", "How large is the staff of {s}?"),
    ),
    "person.birthplace": _Relation(
        ("{s} was born in {v}.", "{s} comes from {v}."),
        ("Where was {s} born?", "In which town was {s} born?", "Where does {s} come from?"),
    ),
    "person.profession": _Relation(
        ("{s} trained as a {v}.", "{s} is a {v} by profession."),
        ("What did {s} train as?", "What is the profession of {s}?", "What is {s} by profession?"),
    ),
    "person.instrument": _Relation(
        ("{s} plays the {v}.", "{s} is a lover of the {v}."),
        ("Which instrument does {s} play?", "What does {s} play?"),
    ),
    "person.founded": _Relation(
        ("{s} is the founder of {v}.", "{s} founded {v}."),
        ("Which company did {s} found?", "What is {s} the founder of?"),
    ),
    "person.leads": _Relation(
        ("{s} is the chief executive of {v}.", "{s} leads {v}."),
        ("Which company does {s} lead?", "Of which company is {s} the chief executive?"),
    ),
    "person.designed": _Relation(
        ("{s} is the designer of the {v}.", "{s} designed the {v}."),
        ("Which product did {s} design?", "What is {s} the designer of?"),
    ),
    "person.mayor": _Relation(
        ("{s} is the mayor of {v}.", "{s} serves as mayor of {v}."),
        ("Of which town is {s} the mayor?", "Where does {s} serve as mayor?"),
    ),
    "town.river": _Relation(
        ("{s} lies on the river {v}.", "{s} stands on the banks of the {v}."),
        ("On which river does {s} lie?", "Which river flows through {s}?", "Which river does {s} stand on?"),
    ),
    "town.known": _Relation(
        ("{s} is known for its {v}.", "{s} is famous for its {v}."),
        ("What is {s} known for?", "What is {s} famous for?"),
    ),
    "town.mayor": _Relation(
        ("{s} has {v} as mayor.", "{s} is governed by {v}."),
        ("Who is the mayor of {s}?", "Who governs {s}?"),
    ),
    "town.region": _Relation(
        ("{s} belongs to the region of {v}.", "{s} is a town in {v}."),
        ("To which region does {s} belong?", "In which region is {s}?"),
    ),
    "town.people": _Relation(
        ("{s} has {v} inhabitants.", "{s} is home to {v} people."),
        ("How many inhabitants does {s} have?", "How many people live in {s}?"),
    ),
    "product.kind": _Relation(
        ("{s} is a kind of {v}.", "{s} is sold as a {v}."),
        ("What kind of product is {s}?", "What is {s} sold as?"),
    ),
    "product.maker": _Relation(
        ("{s} is made by {v}.", "{s} is a product of {v}."),
        ("Who makes {s}?", "Which company makes {s}?", "By which company is {s} made?"),
    ),
    "product.year": _Relation(
        ("{s} was released in {v}.", "{s} came onto the market in {v}."),
        ("In which year was {s} released?", "When was {s} released?", "When did {s} come onto the market?"),
    ),
    "product.designer": _Relation(
        ("{s} was designed by {v}.", "{s} was drawn up by {v}."),
        ("Who designed {s}?", "By whom was {s} designed?", "Who drew up {s}?"),
    ),
    "product.material": _Relation(
        ("{s} is built from {v}.", "{s} has a body of {v}."),
        ("What is {s} built from?", "Which material is {s} built from?"),
    ),
}

_OPTIONAL = {
    "company.year", "company.staff", "person.instrument", "person.profession", "town.people", "town.region",
    "product.year", "product.material",
}  # fmt: skip
"""Facts that a document may leave out; the others carry the two-hop chains."""

_CHAINS: Mapping[tuple[str, str], tuple[str, ...]] = {
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

_FILLERS: Mapping[Kind, Sequence[str]] = {
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


def split_of(word: str) -> Split:
    """Say which split a composed word belongs to, by a hash that is the same on every machine and Python."""
    digest = hashlib.blake2b(word.lower().encode(), digest_size=8).digest()
    return "heldout" if int.from_bytes(digest, "little") % 10 == HELDOUT_BUCKET else "train"


@cache
def _words(part: str, split: Split) -> tuple[str, ...]:
    """List every composed word of one part of speech (a key of `_ENDS`) that belongs to `split`."""
    middles = ("", *_MIDDLES) if part not in ("first", "river") else ("", *_MIDDLES[:4])
    words = {start + middle + end for start in _STARTS for middle in middles for end in _ENDS[part]}
    return tuple(sorted(word for word in words if split_of(word) == split))


class _Names:
    """Draws names that are unique within one world, each word of them used once per part of speech."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A closed set of documents and every question that they answer."""

    seed: int
    split: Split
    documents: tuple[WorldDocument, ...]
    facts: tuple[Fact, ...]
    questions: tuple[WorldQuestion, ...]

    @classmethod
    def generate(cls, seed: int, *, split: Split = "train", size: int = 24) -> World:
        """Build the world of `size` entities (at least 8) that belongs to (`seed`, `split`)."""
        if size < 8:
            raise ValueError(f"a world needs at least 8 entities, not {size}; pass size=8 or more")
        rng = random.Random(f"ragkv-world:{split}:{size}:{seed}")
        values, kinds = _populate(rng, split, size)
        documents: list[WorldDocument] = []
        facts: list[Fact] = []
        for title, kind in kinds.items():
            own, sentences = _write(rng, title, kind, values[title])
            facts.extend(own)
            documents.append(
                WorldDocument(title=title, text=" ".join(sentences), kind=kind, sentences=tuple(sentences))
            )
        return cls(
            seed=seed,
            split=split,
            documents=tuple(documents),
            facts=tuple(facts),
            questions=tuple(_questions(facts)),
        )

    def document(self, title: str) -> WorldDocument:
        """Return the document of the entity named `title`; KeyError if the world has none."""
        for document in self.documents:
            if document.title == title:
                return document
        raise KeyError(title)


def _populate(rng: random.Random, split: Split, size: int) -> tuple[dict[str, dict[str, str]], dict[str, Kind]]:
    """Draw the entities and their relations: (relations by entity name, kind by entity name in document order)."""
    names = _Names(rng, split)
    towns = [names.name("town") for _ in range(max(2, size // 5))]
    companies = [names.name("company") for _ in range(max(2, size // 4))]
    products = [names.name("product") for _ in companies]
    people = [names.name("person") for _ in range(max(2, size - len(towns) - 2 * len(companies)))]
    values: dict[str, dict[str, str]] = {name: {} for name in (*companies, *products, *people, *towns)}

    def holders(count: int) -> list[str]:  # a role is held by distinct people, so that its inverse is a fact too
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
            "product.kind": rng.choice(_KINDS),
            "product.maker": company,
            "product.year": str(rng.randint(year, 2024)),
            "product.designer": designer,
            "product.material": rng.choice(_MATERIALS),
        }
        values[founder].setdefault("person.founded", company)
        values[chief].setdefault("person.leads", company)
        values[designer].setdefault("person.designed", product)
    for town, mayor in zip(towns, mayors, strict=True):
        values[town] |= {
            "town.river": names.word("river"),
            "town.known": rng.choice(_KNOWN_FOR),
            "town.mayor": mayor,
            "town.region": names.word("region"),
            "town.people": str(rng.randint(12, 980) * 100),
        }
        values[mayor].setdefault("person.mayor", town)
    for person in people:
        values[person] |= {
            "person.birthplace": rng.choice(towns),
            "person.profession": rng.choice(_PROFESSIONS),
            "person.instrument": rng.choice(_INSTRUMENTS),
        }
    kinds: dict[str, Kind] = {}
    for kind, members in (("company", companies), ("product", products), ("person", people), ("town", towns)):
        for member in members:
            kinds[member] = kind  # type: ignore[assignment]
    return values, kinds


def _write(rng: random.Random, title: str, kind: Kind, values: Mapping[str, str]) -> tuple[list[Fact], list[str]]:
    """Write one entity's document of four to seven sentences: (facts, sentences in the order of the text)."""
    relations = list(values)
    optional = [relation for relation in relations if relation in _OPTIONAL]
    rng.shuffle(optional)
    while len(relations) > 4 and optional and (len(relations) > 7 or rng.random() < 0.2):
        relations.remove(optional.pop())
    rng.shuffle(relations)
    facts: list[Fact] = []
    for relation in relations:
        wordings = _RELATIONS[relation].sentences
        chosen = rng.choice(wordings)
        sentence, rephrased = (
            _article(wording.format(s=title, v=values[relation]))
            for wording in (chosen, wordings[1 - wordings.index(chosen)])
        )
        facts.append(
            Fact(
                relation=relation,
                subject=title,
                value=values[relation],
                sentence=sentence,
                rephrased=rephrased,
                document=title,
            )
        )
    sentences = [fact.sentence for fact in facts]
    fillers = max(4 - len(sentences), int(len(sentences) < 7 and rng.random() < 0.6))
    for filler in rng.sample(_FILLERS[kind], fillers):
        sentences.insert(rng.randint(0, len(sentences)), filler.format(s=title))
    return facts, sentences


def _article(sentence: str) -> str:
    """Write "an" before a vowel where a template says "a" ("as a engineer")."""
    words = sentence.split(" ")
    for index in range(len(words) - 1):
        if words[index] == "a" and words[index + 1][0] in "aeiou":
            words[index] = "an"
    return " ".join(words)


def _questions(facts: Sequence[Fact]) -> Iterator[WorldQuestion]:
    """Ask every fact in every wording, then every chain of two facts whose bridge has a document."""
    for fact in facts:
        for wording in _RELATIONS[fact.relation].questions:
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
        for (bridge, target), wordings in _CHAINS.items():
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
                    relation=f"{bridge}>{target}",
                    titles=(first.document, last.document),
                    support=(first.sentence, last.sentence),
                )
