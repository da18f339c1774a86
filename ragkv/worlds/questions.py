"""Questions about worlds that share hardly a word with the passage that answers them, and many-shot examples.

BM25 finds a passage by its words; an embedder should find it by its meaning. So these questions describe an entity by
one or two of its facts in other words than the documents ("the animal doctor who is good at the big brass slide"), and
ask for another fact in other words too. The wordings are fixed tables: a small model has no knowledge of its own and
learns them from worlds of the training split. Names, worlds and combinations of the held-out split are new to it.

The many-shot examples are sentences labelled by an arbitrary rule.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ragkv.worlds import Fact, World
from ragkv.worlds.world import listed


def _table(text: str) -> Mapping[str, tuple[str, ...]]:
    """`value: wording / wording` per line."""
    rows = (line.split(":") for line in text.strip().splitlines())
    return {value.strip(): tuple(part.strip() for part in wordings.split("/")) for value, wordings in rows}


_PROFESSION = _table("""
chemist: laboratory scientist of substances / expert on acids and salts
engineer: builder of machines / technical constructor
architect: drawer of house plans / planner of buildings
geologist: rock scientist / expert on the layers of the earth
physician: healer of the sick / medical doctor
clockmaker: maker of timepieces / mender of watches
botanist: plant scientist / expert on flowers
lawyer: pleader in court / legal adviser
teacher: schoolmaster / instructor of children
carpenter: worker in wood / joiner of beams
pilot: flyer of aeroplanes / captain in the sky
surveyor: measurer of land / plotter of boundaries
economist: scholar of money and trade / student of markets
historian: scholar of the past / chronicler of old times
mathematician: scholar of numbers / prover of theorems
glassblower: shaper of molten panes / maker of bottles at the furnace
baker: seller of loaves / owner of a hot oven
journalist: newspaper reporter / writer for the press
translator: carrier of words between languages / interpreter of foreign texts
biologist: scientist of living things / researcher of cells
blacksmith: hammerer at the anvil / shoer of horses
librarian: keeper of shelves full of volumes / lender of novels
astronomer: watcher of the stars / observer of planets
tailor: sewer of suits / cutter of coats and trousers
sailor: seafarer / deckhand on ships
nurse: carer at hospital beds / helper on the ward
potter: turner of clay bowls / shaper of jugs on a wheel
veterinarian: animal doctor / healer of cattle and dogs
photographer: taker of pictures / portrait maker with a lens
printer: setter of type / producer of leaflets
dentist: tooth doctor / filler of cavities
welder: joiner of metal with a torch / worker with sparks and a mask
""")
_INSTRUMENT = _table("""
cello: large bowed strings held between the knees / deep sister of the fiddle
violin: fiddle / small bowed strings under the chin
flute: silver pipe blown from the side / woodwind without a reed
piano: black and white keys with hammers / grand keyboard with pedals
accordion: squeezebox / bellows with buttons
trumpet: bright brass with three valves / fanfare brass
harp: tall plucked frame of strings / angel's strings
oboe: double reed that gives the tuning note / small nasal woodwind
guitar: six plucked strings with frets / campfire strings
clarinet: single reed in black wood / licorice stick
mandolin: eight short strings in pairs / small Italian strings with a plectrum
banjo: strings over a skin drum / twanging five strings
drums: sticks and cymbals / percussion kit
organ: pipes in a church loft / many pipes with stops
viola: alto of the bowed family / slightly larger fiddle
bassoon: long low double reed / grumbling tall woodwind
saxophone: curved brass reed of jazz bands / golden horn of jazz
lute: pear shaped strings of the minstrels / renaissance plucked strings
trombone: brass with a slide / sliding low brass
zither: many strings over a flat box / alpine table strings
""")
_KIND = _table("""
folding bicycle: two-wheeler that collapses / cycle for the train
desk lamp: light for the writing place / table light
water pump: machine that lifts a liquid from a well / device that moves liquid
camping stove: small cooker for tents / portable burner for hikers
pocket radio: tiny receiver of broadcasts / wireless for the jacket
coffee grinder: mill for roasted beans / crusher of beans
sewing machine: stitcher of cloth / apparatus with needle and thread
rain coat: garment against wet weather / waterproof clothing
fishing reel: winder for an angler's line / angler's spool
hand drill: tool that bores holes / borer without a motor
wall clock: timepiece that hangs / hanging dial with hands
microscope: magnifier of tiny things / enlarger of cells for the eye
garden tractor: small vehicle for lawns / mower that one rides
electric kettle: boiler for tea / plug-in boiler
snow blower: clearer of winter driveways / thrower of white flakes
bread oven: heater for loaves / hot chamber of a bakery
pressure gauge: meter of steam force / dial for how hard a gas pushes
sailing boat: vessel driven by wind / yacht
reading chair: seat for book lovers / comfortable seat with a shelf
typewriter: writing machine with letters on levers / office machine before computers
hearing aid: helper for deaf ears / amplifier worn in the ear
milk separator: divider of cream / dairy centrifuge
weather station: set of sensors for wind and rain / forecaster's device
cable winch: puller with a drum of rope / hoist with a steel rope
tea set: cups with a pot / porcelain for five o'clock
paper cutter: guillotine for sheets / trimmer of pages
road roller: flattener of asphalt / heavy compactor of streets
wheel loader: digger with a front bucket / shovel vehicle on tyres
air compressor: squeezer of gas for tools / supplier of compressed gas
film camera: recorder of moving pictures / cinema shooter
cargo trailer: load carrier towed behind a car / towed wagon for goods
barometer: teller of storms by mercury / measurer of atmospheric weight
""")
_MATERIAL = _table("""
brass: yellow alloy of zinc / golden alloy
oak: hard timber from acorn trees / timber of the acorn
aluminium: light silvery metal / metal from bauxite
copper: reddish metal of wires / metal that turns green on roofs
bamboo: giant grass canes / hollow canes
steel: hardened iron alloy / alloy of girders
leather: tanned hide / cow skin
walnut: dark timber of a nut tree / brown nut timber
cork: stopper bark / light bark from Portugal
glass: transparent melted sand / clear brittle stuff
titanium: strong light metal of rockets / metal of jet engines
cast iron: poured heavy metal / metal of old stoves
ash wood: springy pale timber of tool handles / pale elastic timber
bronze: alloy of tin / statue metal
linen: flax cloth / woven flax
carbon fibre: black racing composite / woven black composite
pine: resinous conifer timber / soft conifer boards
zinc: grey coating metal against rust / galvanising metal
stoneware: dense fired clay / grey fired ceramic
maple: syrup tree timber / timber of the red autumn leaves
""")
_KNOWN = _table("""
smoked trout: fish cured over embers / cured river fish
iron bridge: metal crossing over the water / old crossing of girders
lavender fields: purple fragrant meadows / scented violet rows
salt mines: underground white mineral pits / tunnels of white crystals
blue pottery: azure ceramics / sky-coloured bowls
stone lighthouse: granite beacon for ships / masonry tower with a lamp
cherry orchards: red fruit groves / groves of small red fruit
paper mills: factories of sheets / works that turn pulp to sheets
winter market: December stalls / frosty season stalls
old observatory: ancient dome for stargazing / historic telescope dome
apple cider: fermented fruit drink / pressed orchard drink
wool carpets: woven sheep rugs / thick rugs of fleece
glass museum: collection of goblets and panes / exhibition of vases
goat cheese: tangy dairy of horned animals / white dairy from the hills
clock tower: tall belfry with dials / high building that strikes the hours
thermal baths: hot springs / warm healing pools
honey cakes: sweet bee pastries / pastries of the beekeepers
botanical garden: park of rare plants / greenhouse park
puppet theatre: marionette stage / stage of wooden figures on strings
copper roofs: green metal house tops / house tops of reddish metal
walnut bread: nutty loaves / loaves with brown kernels
ferry festival: celebration of the river boats / feast of the boats
rose gardens: beds of thorny blossoms / thorny blossoms
silk weavers: makers of fine cloth from cocoons / looms of fine thread
slate quarries: pits of roofing stone / pits of dark split rock
chess tournament: contest of kings and pawns / contest on the board of squares
horse fair: trade of mares and stallions / sale of mares
pepper sauce: hot spicy condiment / burning condiment
wooden churches: timber houses of prayer / chapels made of logs
kite festival: day of paper flyers in the wind / feast of flying paper
""")

_DESCRIPTIONS: Mapping[str, tuple[Mapping[str, tuple[str, ...]], tuple[str, ...]]] = {
    "person.profession": (_PROFESSION, ("whose job is {w}", "who earns a living as {w}")),
    "person.instrument": (_INSTRUMENT, ("who makes music on the {w}", "who is good at the {w}")),
    "product.kind": (_KIND, ("that serves as {w}", "that people use as {w}")),
    "product.material": (_MATERIAL, ("consisting of {w}", "with parts of {w}")),
    "town.known": (_KNOWN, ("that guests visit because of {w}", "whose pride is {w}")),
}
_NOUNS: Mapping[str, tuple[str, ...]] = {
    "person": ("the person", "somebody", "the one"),
    "product": ("the article", "the thing", "the device"),
    "town": ("the place", "the community", "the municipality"),
}
_ASKED: Mapping[str, tuple[str, ...]] = {
    "person.birthplace": ("What is the native place of {d}?", "Name the cradle of {d}."),
    "person.profession": ("How does {d} earn money?", "Tell me the job of {d}."),
    "person.instrument": ("With what does {d} make music?",),
    "person.founded": ("Which firm did {d} bring into being?", "What enterprise owes its beginning to {d}?"),
    "person.leads": ("Which firm has {d} at the top?", "Of what enterprise is {d} the head?"),
    "person.designed": ("What article was invented by {d}?",),
    "person.mayor": ("Which community elected {d}?",),
    "product.kind": ("What purpose does {d} have?",),
    "product.maker": ("Which firm manufactures {d}?", "Who is the manufacturer of {d}?"),
    "product.year": ("Since when can one buy {d}?", "How long has {d} been for sale?"),
    "product.designer": ("Who invented {d}?", "Whose idea was {d}?"),
    "product.material": ("What stuff is {d} of?",),
    "town.river": ("Which stream passes {d}?", "What water runs past {d}?"),
    "town.mayor": ("Who runs the council of {d}?", "Which politician heads {d}?"),
    "town.region": ("What part of the country surrounds {d}?",),
    "town.people": ("What is the population of {d}?", "How many citizens live at {d}?"),
}
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
    relation: str
    fact: str
    traits: tuple[str, ...]


def paraphrases(world: World, *, seed: int = 0, wordings: int = 2) -> tuple[Paraphrase, ...]:
    """Up to `wordings` questions about every askable fact of every entity that its traits identify."""
    rng = random.Random(f"ragkv-paraphrase:{world.split}:{world.seed}:{seed}")
    by_entity: dict[str, list[Fact]] = defaultdict(list)
    for fact in world.facts:
        by_entity[fact.subject].append(fact)
    result = Counter(pair for facts in by_entity.values() for pair in _subsets(facts))
    found = []
    for facts in by_entity.values():
        for asked in facts:
            choices = [
                traits for traits in _subsets([fact for fact in facts if fact is not asked]) if result[traits] == 1
            ]
            if asked.relation in _ASKED and choices:
                for _ in range(wordings):
                    traits = rng.choice(choices)
                    found.append(
                        Paraphrase(
                            question=_ask(rng, asked.relation, traits),
                            title=asked.document,
                            gold=asked.value,
                            relation=asked.relation,
                            fact=asked.sentence,
                            traits=tuple(f.sentence for f in facts if (f.relation, f.value) in traits),
                        )
                    )
    return tuple(dict.fromkeys(found))


def shared_words(question: str, passage: str) -> int:
    """The number of words, without stop words, that a question shares with a passage."""
    return len(_words(question) & _words(passage))


def _words(text: str) -> set[str]:
    return {word for raw in text.lower().split() if (word := raw.strip(".,?!'#"))} - set(_STOP_WORDS.split())


Trait = tuple[str, str]


def _subsets(facts: Sequence[Fact]) -> Iterator[tuple[Trait, ...]]:
    """All single traits and pairs of traits for which there is a wording."""
    traits = sorted((fact.relation, fact.value) for fact in facts if fact.relation in _DESCRIPTIONS)
    for index, trait in enumerate(traits):
        yield (trait,)
        yield from ((trait, other) for other in traits[index + 1 :])


def _ask(rng: random.Random, relation: str, traits: Sequence[Trait]) -> str:
    noun = rng.choice(_NOUNS[traits[0][0].split(".")[0]])
    clauses = []
    for trait, value in rng.sample(list(traits), len(traits)):
        words, frames = _DESCRIPTIONS[trait]
        clauses.append(rng.choice(frames).format(w=rng.choice(words[value])))
    return rng.choice(_ASKED[relation]).format(d=f"{noun} {' and '.join(clauses)}")


GROUPS: Mapping[str, Sequence[str]] = {
    "animal": listed(
        "horse dog cat cow goat sheep lion tiger bear wolf fox rabbit eagle owl duck goose whale shark frog"
    ),
    "tool": listed("hammer saw drill chisel wrench pliers screwdriver axe shovel rake ladder crowbar file clamp lathe"),
    "fruit": listed("apple pear plum cherry peach grape lemon orange banana mango melon fig apricot papaya kiwi"),
    "clothing": listed("coat shirt hat glove scarf sock boot skirt jacket sweater belt vest cap sandal apron"),
    "vehicle": listed("car truck bus train tram bicycle boat ferry canoe airplane tractor scooter van wagon sled"),
    "instrument": listed("piano violin flute drum guitar trumpet harp cello clarinet banjo oboe tuba organ lute viola"),
}
_HELD_OUT = 5  # things per group that are in no shot


class Shots:
    """Sentences about things, each with the label of the thing's group.

    The label depends only on the group. `shown` are the (group, thing) pairs in order; `labels` maps groups to labels.
    """

    def __init__(self, rng: random.Random, *, count: int, classes: int, labels: Sequence[str]) -> None:
        groups = rng.sample(sorted(GROUPS), classes)
        self.labels = dict(zip(groups, rng.sample(labels, classes), strict=True))
        self._things = {group: rng.sample(GROUPS[group], len(GROUPS[group])) for group in groups}
        turns = [groups[at % classes] for at in range(count)]  # every label about as often
        rng.shuffle(turns)
        self.shown = [(group, rng.choice(self._things[group][_HELD_OUT:])) for group in turns]

    def fresh(self, rng: random.Random) -> tuple[str, str]:
        """A pair (group, thing) that is in no shot."""
        group = rng.choice(list(self.labels))
        return group, rng.choice(self._things[group][:_HELD_OUT])

    def chunks(self, sentences: Sequence[str], size: int) -> list[str]:
        """All shots as texts of `size` shots. `sentences` are in the order of `shown`."""
        labels = [self.labels[group] for group, _ in self.shown]
        lines = [f"{shot_text(message)} {label}" for message, label in zip(sentences, labels, strict=True)]
        return ["\n\n".join(lines[at : at + size]) for at in range(0, len(lines), size)]


def neutral_sentence(rng: random.Random, thing: str, places: Sequence[str]) -> str:
    """A sentence about `thing` that does not reveal its label."""
    return f"The {thing} is {rng.choice(places)}."


def shot_text(message: str) -> str:
    """The text before a label."""
    return f"Input: {message}\nLabel:"
