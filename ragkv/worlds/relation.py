"""What can be said and asked of an entity: the wordings of every relation, chain and filler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ragkv.worlds.name import Kind

__all__ = ["CHAINS", "FILLERS", "OPTIONAL", "RELATIONS", "Relation", "article"]


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
