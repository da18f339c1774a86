"""Invented documents with questions, for tuning a small model to read.

Each document is about one thing of a domain (a kettle, a museum, a contract ...) whose facts are drawn
by chance.  The domains are in `worlds.txt`, in a small notation, and lists of words in `words.txt`:

    @ name                      a new domain
    set x = spec                a slot {x}, drawn once for each thing
    S spec | spec               what the thing is called, with its article
    def the kettle | the unit   other ways to refer to it once it has been named
    pron it its                 its pronouns ("auto" takes those that fit a person's name)
    title / intro / ~           titles, first sentences, and sentences that tell nothing that is asked
    ! question                  a question that no document of the domain answers
    * id: spec && spec || spec  a fact with its value {v} and perhaps {w}; || parts alternatives; facts
                                with the same id, up to a slash, exclude each other
    # Label: cell               how the fact looks in a table or list
    + text                      continues the line before
    >  ?  =                     statements, questions and answers; ?2 and =2 ask for {w} instead of {v};
                                "? ^" repeats the questions of the fact before
    ?p  ?2p                     the same questions in other words than those of the statements

{S} is the full name, {s} the same without its article, {T} whatever fits best (name, noun or pronoun),
{T's} its possessive, and "a(n)" becomes a or an.  Alternatives are parted by " | ".
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

UNKNOWN = "The documents do not say."


@dataclass(frozen=True)
class GeneratedDocument:
    """A document in Markdown with its questions, each as (question, answer, key)."""

    title: str
    text: str
    questions: tuple[tuple[str, str, str], ...]


@dataclass
class DomainFact:
    """One attribute of a domain with its wordings."""

    name: str
    values: list[tuple[str, str]]
    label: str = ""
    cell: str = ""
    lines: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class Domain:
    """A kind of thing that documents are about."""

    name: str
    slots: list[tuple[str, str]] = field(default_factory=list)
    lines: dict[str, list[str]] = field(default_factory=dict)
    facts: dict[str, list[DomainFact]] = field(default_factory=dict)


@dataclass
class Thing:
    """One thing of a domain with the facts drawn for it."""

    slots: dict[str, str]
    drawn: dict[str, tuple[DomainFact, str, str]]


HERE = Path(__file__).parent
POOLS = {
    name: words.split("; ")
    for name, words in (line.split(": ", 1) for line in (HERE / "words.txt").read_text(encoding="utf-8").splitlines())
}
WOMEN = POOLS["WOMEN"]
MEN = POOLS["MEN"]
SURNAMES = POOLS["SURNAMES"]
TOWNS = POOLS["TOWNS"]
COUNTRIES = POOLS["COUNTRIES"]
MONTHS = POOLS["MONTHS"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
COLOURS = POOLS["COLOURS"]
MATERIALS = POOLS["MATERIALS"]
WORDS = POOLS["WORDS"]
HEADS = POOLS["HEADS"]
MIDDLES = ["", "", "", "ri", "vo", "ta", "ne", "lo", "da", "mi", "sa", "ke"]
TAILS = POOLS["TAILS"]
STREETS = POOLS["STREETS"]


def invented(r: random.Random) -> str:
    """A made-up name."""
    return r.choice(HEADS) + r.choice(MIDDLES) + r.choice(TAILS)


def surname(r: random.Random) -> str:
    """A real surname."""
    return r.choice(SURNAMES)


def integer(r: random.Random, low: int, high: int, step: int = 1) -> str:
    """A whole number, with commas from ten thousand on."""
    number = r.randrange(low, high + 1, step)
    return f"{number:,}" if number >= 10000 else str(number)


def date(r: random.Random, low: int = 2019, high: int = 2027) -> str:
    """A date in one of three styles."""
    day, month, year = r.randint(1, 28), r.choice(MONTHS), r.randint(low, high)
    return r.choice([f"{day} {month} {year}", f"{month} {day}, {year}", f"{day} {month} {year}"])


def price(r: random.Random, low: int, high: int, sign: str) -> str:
    """A sum of money."""
    amount = r.randint(low, high)
    if amount > 400:
        amount -= amount % 5
    number = f"{amount:,}" if amount >= 1000 else str(amount)
    if amount < 100 and r.random() < 0.4:
        number += r.choice([".50", ".90", ".25", ".99"])
    return sign + number


def clock(r: random.Random, low: int, high: int, style: str) -> str:
    """A time of day, in the 24-hour style or with am and pm."""
    hour, minute = r.randint(low, high), r.choice([0, 0, 15, 30, 30, 45, 10, 20])
    if style == "24":
        return f"{hour:02d}:{minute:02d}"
    half = "p.m." if hour >= 12 else "a.m."
    shown = (hour - 1) % 12 + 1
    return f"{shown}:{minute:02d} {half[0]}m" if minute else f"{shown} {half[0]}m"


def address(r: random.Random) -> str:
    """An e-mail address."""
    left = r.choice(["info", "help", "office", "bookings", "support", "desk", "hello", "service", surname(r).lower()])
    return f"{left}@{invented(r).lower()}.{r.choice(['example', 'org', 'com', 'net', 'co.uk'])}"


def person(r: random.Random) -> str:
    """A full name, now and then with a title."""
    name = f"{r.choice(WOMEN + MEN)} {surname(r)}"
    return r.choice(["Dr ", "Professor "]) + name if r.random() < 0.08 else name


def room(r: random.Random) -> str:
    """A room."""
    return r.choice(
        [f"Room {r.randint(2, 480)}", f"Room {r.choice('ABCDE')}{r.randint(1, 40)}", f"Hall {r.randint(1, 9)}"]
    )


def code(r: random.Random) -> str:
    """A model or reference number."""
    letters = "".join(r.choice("ABCDEFGHKLMNPRSTVX") for _ in range(r.randint(1, 2)))
    return r.choice(
        [f"{letters}{r.randint(2, 99) * 10}", f"{letters}-{r.randint(10, 999)}", f"{letters}{r.randint(2, 9)}"]
    )


MAKERS: dict[str, Callable[..., str]] = {
    "invented": invented,
    "surname": surname,
    "person": person,
    "woman": lambda r: f"{r.choice(WOMEN)} {surname(r)}",
    "man": lambda r: f"{r.choice(MEN)} {surname(r)}",
    "town": lambda r: r.choice(TOWNS) if r.random() < 0.6 else invented(r) + r.choice(["ham", "ford", "burg", "by"]),
    "country": lambda r: r.choice(COUNTRIES),
    "month": lambda r: r.choice(MONTHS),
    "workday": lambda r: r.choice(DAYS[:5]),
    "weekday": lambda r: r.choice(DAYS),
    "colour": lambda r: r.choice(COLOURS),
    "material": lambda r: r.choice(MATERIALS),
    "word": lambda r: r.choice(WORDS),
    "Word": lambda r: r.choice(WORDS).capitalize(),
    "date": lambda r, low="2019", high="2027": date(r, int(low), int(high)),
    "day": lambda r: f"{r.randint(1, 28)} {r.choice(MONTHS)}",
    "int": lambda r, low, high, step="1": integer(r, int(low), int(high), int(step)),
    "year": lambda r, low, high: str(r.randint(int(low), int(high))),
    "dec": lambda r, low, high: f"{r.randint(int(low), int(high) - 1)}.{r.randint(1, 9)}",
    "pct": lambda r, low="5", high="95": r.choice(["{}%", "{}%", "{} per cent", "{} percent"]).format(
        r.randint(int(low), int(high))
    ),
    "email": address,
    "phone": lambda r: f"0{r.randint(110, 999)} {r.randint(100, 999)} {r.randint(1000, 9999)}",
    "room": room,
    "code": code,
    "street": lambda r: f"{r.randint(2, 190)} {r.choice(STREETS)} {r.choice(['Street', 'Road', 'Lane', 'Square'])}",
    "road": lambda r: f"{r.choice(STREETS)} {r.choice(['Street', 'Road', 'Lane', 'Square'])}",
    "pick": lambda r, *options: r.choice(":".join(options).split(";")),
}


def fill(template: str, r: random.Random, slots: dict[str, str]) -> str:
    """Put values into the slots of a template."""

    def one(match: re.Match[str]) -> str:
        name, *rest = match[1].split(":")
        if name in slots:
            return slots[name]
        if name == "plus":  # a number a little above that of another slot
            return str(int(slots[rest[0]]) + r.randint(int(rest[1]), int(rest[2])))
        numbers = [int(each) for each in rest] if name in ("price", "time") else []
        if name == "price":
            return price(r, numbers[0], numbers[1], slots["sign"])
        if name == "time":
            low, high = numbers or (6, 22)
            return clock(r, low, high, slots["clock"])
        return MAKERS[name](r, *rest)

    return re.sub(r"\{([^{}]+)\}", one, template)


def articles(text: str) -> str:
    """Turn every a(n) into a or an, by the word after it."""

    def one(match: re.Match[str]) -> str:
        word = match[2].lstrip("£$€*\"'“")
        number = re.match(r"\d+", word)
        if number:
            vowel = number[0].startswith("8") or number[0] in ("11", "18")
        elif re.match(r"[A-Z]+[-\d]", word):
            vowel = word[0] in "AEFHILMNORSX"
        else:
            vowel = bool(re.match(r"[aeiou]", word, re.IGNORECASE)) and not re.match(
                r"(uni|use|one\b|eu|ukul)", word, re.IGNORECASE
            )
            vowel = vowel or bool(re.match(r"(hour|honest|heir)", word, re.IGNORECASE))
        return f"{match[1]}{'n' if vowel else ''} {match[2]}"

    return re.sub(r"\b([Aa])\(n\) (\S+)", one, text)


def sentence(text: str) -> str:
    """Resolve the articles and begin with a capital letter."""
    text = articles(text).replace("p.m..", "p.m.").replace("a.m..", "a.m.")
    return text[:1].upper() + text[1:]


def subject(statement: str) -> str:
    """Let a statement that begins with a pronoun for the thing begin with whatever names it best."""
    if re.match(r"It (was \{[vw]\} (who|that)|takes about|all|was agreed|was decided)", statement):
        return statement
    return re.sub(r"^Its ", "{T's} ", re.sub(r"^It ", "{T} ", statement))


def usable(templates: list[str], value: str, second: str) -> list[str]:
    """The templates that do not begin with a lower-case value, which a capital letter would change."""
    return [
        t
        for t in templates
        if not (t.startswith("{v}") and value[:1].islower()) and not (t.startswith("{w}") and second[:1].islower())
    ]


def parse(text: str) -> list[Domain]:
    """Read the domains from their notation."""
    domains: list[Domain] = []
    fact, before = None, None
    for raw in text.replace("\n+ ", " ").strip().splitlines():
        line = raw.strip()
        if not line:
            continue
        mark, _, rest = line.partition(" ")
        rest = rest.strip()
        parts = [part.strip() for part in rest.split(" | ")]
        if mark == "@":
            domains.append(Domain(rest))
            fact = before = None
        elif mark == "set":
            name, _, spec = rest.partition(" = ")
            domains[-1].slots.append((name, spec))
        elif mark == "*":
            before = fact
            name, _, spec = rest.partition(": ")
            pairs = [(alt + " && ").split(" && ")[:2] for alt in spec.split(" || ")]
            shared = pairs[-1][1].strip()
            fact = DomainFact(name, [(a.strip(), b.strip() or shared) for a, b in pairs])
            domains[-1].facts.setdefault(name.split("/")[0], []).append(fact)
        elif mark == "#" and fact:
            fact.label, _, fact.cell = (part.strip() for part in rest.partition(":"))
            fact.cell = fact.cell or "{v}"
        elif mark in (">", "?", "=", "?2", "=2", "?p", "?2p") and fact:
            if parts[0] == "^" and before:
                parts = before.lines.get(mark, []) + parts[1:]
            if mark == ">":
                parts = [subject(part) for part in parts]
            fact.lines.setdefault(mark, []).extend(parts)
        elif mark in ("S", "def", "pron", "title", "intro", "~", "!"):
            domains[-1].lines.setdefault(mark, []).extend(parts)
        else:
            raise ValueError(f"not understood: {line}")
    return domains


def thing(domain: Domain, r: random.Random, style: dict[str, str]) -> Thing:
    """Draw a thing with all its facts, in the style of its document (sign of money, way to tell the time)."""
    slots = dict(style)
    for name, spec in domain.slots:
        slots[name] = fill(r.choice(spec.split(" || ")), r, slots)
    slots["S"] = articles(fill(r.choice(domain.lines["S"]), r, slots))
    slots["s"] = re.sub(r"^(the|a|an) ", "", slots["S"])
    pronouns = domain.lines.get("pron", ["it its"])[0]
    if pronouns == "auto":
        pronouns = "she her" if slots["S"].split()[0] in WOMEN else "he his"
    slots["he"], slots["his"] = pronouns.split()
    drawn = {}
    for name, cases in domain.facts.items():
        fact = r.choice(cases)
        first, second = r.choice(fact.values)
        drawn[name] = (fact, fill(first, r, slots), fill(second, r, slots))
    return Thing(slots, drawn)


class Writer:
    """Writes sentences about a thing, naming it so that it is always clear what is meant."""

    def __init__(self, domain: Domain, r: random.Random) -> None:
        self.domain, self.r, self.named = domain, r, False

    def fill(self, template: str, about: Thing, value: str = "", second: str = "", full: bool = False) -> str:
        """One sentence from a template."""
        r, slots = self.r, dict(about.slots, v=value, w=second)
        draw = r.random()
        if full or not self.named or draw < 0.3:
            slots["T"], slots["T's"] = slots["S"], slots["S"] + "'s"
        elif draw < 0.72 or "def" not in self.domain.lines:
            slots["T"], slots["T's"] = slots["he"], slots["his"]
        else:
            slots["T"] = fill(r.choice(self.domain.lines["def"]), r, slots)
            slots["T's"] = slots["T"] + "'s"
        self.named = "{T" in template or "{S}" in template
        return sentence(fill(template, r, slots))

    def fact(self, about: Thing, name: str, full: bool = False) -> str:
        """A statement of a fact."""
        fact, value, second = about.drawn[name]
        return self.fill(self.r.choice(usable(fact.lines[">"], value, second)), about, value, second, full)


def ask(template: str, about: Thing, r: random.Random, value: str = "", second: str = "") -> str:
    """A question as a user may type it."""
    text = fill(template, r, dict(about.slots, v=value, w=second, T=about.slots["S"]))
    draw = r.random()
    if not text.endswith("?") or draw < 0.1:
        text = articles(text)
        return text.lower().rstrip("?") if r.random() < 0.6 else text.rstrip("?")
    text = sentence(text)
    if draw < 0.16:
        text = text.lower()
    elif draw < 0.19:
        text = r.choice(["Quick question: ", "Hello! ", "One thing I need to know: ", "Please tell me: "]) + text
    elif draw < 0.21:
        text += r.choice([" Thanks.", " Thank you!", " I could not find it."])
    return text


def asked_as(fact: DomainFact, mark: str, r: random.Random, *, named: bool = False) -> list[str]:
    """A fact's questions, six times of ten those in other words than the statements', if there are any.

    `named`: only those that say which thing they ask about.
    """
    other_words = [w for w in fact.lines.get(f"{mark}p", []) if not named or re.search(r"{[SsT]", w)]
    return other_words if other_words and r.random() < 0.6 else fact.lines[mark]


def answerable(about: Thing, name: str, text: str, r: random.Random, *, named: bool) -> tuple[str, str, str]:
    """A question about a stated fact, its answer and the key that the answer must hold."""
    fact, value, second = about.drawn[name]
    marks, key = ("?", "="), value
    if "?2" in fact.lines and second and second in text and r.random() < 0.45:
        marks, key = ("?2", "=2"), second
    wordings = asked_as(fact, marks[0], r, named=named)
    wordings = [w for w in wordings if "{w}" not in w or second in text] or wordings
    if marks[0] == "?" and fact.label and not fact.label.endswith("?") and r.random() < 0.06:
        wordings = ["{s} " + fact.label.lower(), fact.label.lower() + " {s}"]
    question = ask(r.choice(wordings), about, r, value, second)
    slots = dict(about.slots, v=value, w=second)
    plain = r.random() < 0.6
    slots["T"] = slots["S"] if plain else slots["he"]
    slots["T's"] = slots["S"] + "'s" if plain else slots["his"]
    templates = fitting(usable(fact.lines[marks[1]], value, second), question)
    answers = [sentence(fill(template, r, slots)) for template in templates]
    return question, r.choice([each for each in answers if len(each.split()) > 3] or answers), key


def fitting(answers: list[str], question: str) -> list[str]:
    """The answers that fit the form of a question: "yes" and "no" only where it can be answered so."""
    lead = re.sub(r"^(Quick question: |Hello! |One thing I need to know: |Please tell me: )", "", question).lower()
    polar = re.match(r"(is|are|can|could|does|do|did|may|will|has|have|was|am)\b", lead)
    yes_or_no = [answer for answer in answers if re.match(r"(Yes|No), ", answer)]
    if polar:
        return yes_or_no or answers
    if not re.match(r"(what|which|who|how|where|when|why|until|by|in|on|at|from|to|for|up|within)", lead):
        return answers
    rest = [answer for answer in answers if answer not in yes_or_no]
    return rest or [re.sub(r"^(Yes|No), ", "", answer) for answer in yes_or_no]


HEADINGS = ["At a glance", "Key facts", "Details", "Overview", "In brief", "The essentials", "Facts and figures"]
MORE = ["Further information", "Good to know", "Notes", "More", "Also worth knowing", "In practice", "Remarks"]


def rows(pairs: list[list[str]], r: random.Random, heads: tuple[str, ...] = ()) -> str:
    """A list of facts as a table or as list items."""
    if not heads and r.random() < 0.5:
        style = r.choice(["- {}: {}", "- **{}:** {}", "* {} – {}", "- **{}**: {}"])
        return "\n".join(style.format(*pair) for pair in pairs)
    first = r.choice(["", "Item", "Feature", "Detail", "What"])
    heads = heads or (r.choice(["Value", "Details", "Entry"]),)
    lines = [f"| {' | '.join((first, *heads))} |", "|" + " --- |" * (len(heads) + 1)]
    return "\n".join(lines + [f"| {' | '.join(pair)} |" for pair in pairs])


def document(domain: Domain, r: random.Random) -> GeneratedDocument:
    """One document of a domain."""
    style = {"sign": r.choice("££$$€"), "clock": r.choice(["24", "12"])}
    main, sibling, stranger = thing(domain, r, style), thing(domain, r, style), thing(domain, r, style)
    while len({main.slots["s"].lower(), sibling.slots["s"].lower(), stranger.slots["s"].lower()}) < 3:
        sibling, stranger = thing(domain, r, style), thing(domain, r, style)
    names = list(main.drawn)
    r.shuffle(names)
    count = max(5, min(len(names) - 1, round(len(names) * r.uniform(0.6, 0.8))))
    stated, unstated = names[:count], names[count:]
    writer = Writer(domain, r)
    chat = r.sample(domain.lines["~"], len(domain.lines["~"]))
    title = sentence(fill(r.choice(domain.lines["title"]), r, main.slots))
    blocks: list[str] = []
    written: list[tuple[Thing, str]] = [(main, name) for name in stated]
    listed: list[str] = []
    layout = r.random()
    if layout < 0.55:
        listed = [n for n in stated if main.drawn[n][0].label][: r.randint(3, 5)]
    left = [n for n in stated if n not in listed]
    paragraph = [writer.fill(r.choice(domain.lines["intro"]), main, full=True)]
    split = r.randint(0, len(left)) if listed else r.randint(2, max(2, len(left) - 2))
    for place, name in enumerate(left):
        if place == split:
            blocks.append(" ".join(paragraph))
            paragraph, writer.named = [], False
        paragraph.append(writer.fact(main, name, full=not paragraph and r.random() < 0.9))
        template = r.choice(usable(main.drawn[name][0].lines[">"], *sibling.drawn[name][1:]) or [""])
        if r.random() < 0.07 and template.startswith("{T") and sibling.drawn[name][0] is main.drawn[name][0]:
            paragraph.append(writer.fill(template, sibling, *sibling.drawn[name][1:], full=True))
            written.append((sibling, name))
            writer.named = False
        elif r.random() < 0.12:
            paragraph += [writer.fill(chat.pop(), main)] if chat else []
    if paragraph:
        blocks.append(" ".join(paragraph))
    if listed:
        if r.random() < 0.35:
            cells = []
            for name in listed:
                pair = []
                for subject in (main, sibling):
                    fact, value, second = subject.drawn[name]
                    pair.append(articles(fill(fact.cell or "{v}", r, dict(subject.slots, v=value, w=second))))
                    if subject is sibling:
                        written.append((sibling, name))
                cells.append([main.drawn[name][0].label, *pair])
            table = rows(cells, r, (sentence(main.slots["s"]), sentence(sibling.slots["s"])))
        else:
            pairs = []
            for name in listed:
                fact, value, second = main.drawn[name]
                pairs.append([fact.label, articles(fill(fact.cell, r, dict(main.slots, v=value, w=second)))])
            table = rows(pairs, r)
        blocks.insert(min(1, len(blocks)) if r.random() < 0.6 else len(blocks), table)
    if r.random() < 0.4 and len(blocks) > 1:
        blocks[0] = f"## {r.choice(HEADINGS)}\n\n{blocks[0]}"
        blocks[-1] = f"## {r.choice(MORE)}\n\n{blocks[-1]}"
    if r.random() < 0.7:
        blocks.insert(0, f"# {title}")
    if r.random() < 0.22:  # a section about another thing, whose facts are not those of the first
        more = r.sample(list(sibling.drawn), r.randint(3, 5))
        opening = writer.fill(r.choice(domain.lines["intro"]), sibling, full=True)
        blocks.append(f"## {sentence(sibling.slots['s'])}")
        blocks.append(" ".join([opening, *(writer.fact(sibling, name) for name in more)]))
        written += [(sibling, name) for name in more if (sibling, name) not in written]
    while chat and len(" ".join(blocks).split()) < 66:
        blocks.append(writer.fill(chat.pop(), main, full=True))
    text = "\n\n".join(blocks)
    r.shuffle(written)
    mine = [pair for pair in written if pair[0] is main]
    others = [pair for pair in written if pair[0] is not main][:2]
    asked = others + mine
    goal, questions = r.randint(9, 14), list[tuple[str, str, str]]()
    for subject, name in asked + asked * 4:  # again from the start where there are few facts
        question = answerable(subject, name, text, r, named=subject is not main)
        if question[2] in text and question[0] not in [known for known, _, _ in questions]:
            questions.append(question)
        if len(questions) == goal:
            break
    r.shuffle(questions)
    wanting: list[str] = []
    while len(wanting) < 2:
        draw = r.random()
        if draw < 0.3:
            wish = ask(r.choice(domain.lines["!"]), main, r)
        elif draw < 0.65:
            fact, value, second = main.drawn[r.choice(unstated)]
            wish = ask(r.choice(asked_as(fact, "?", r)), main, r, value, second)
        else:
            fact, value, second = stranger.drawn[r.choice(stated)]
            wish = ask(r.choice(asked_as(fact, "?", r, named=True)), stranger, r, value, second)
        if wish not in wanting:
            wanting.append(wish)
    return GeneratedDocument(title, text, (*questions, *((question, UNKNOWN, "") for question in wanting)))


def documents(seed: int, count: int) -> list[GeneratedDocument]:
    """The first `count` documents of a seed."""
    domains = parse(DOMAINS)
    order = random.Random(f"worlds {seed}")
    produced: list[GeneratedDocument] = []
    while len(produced) < count:
        order.shuffle(domains)
        for domain in domains:
            produced.append(document(domain, random.Random(f"worlds {seed} {len(produced)}")))
    check(produced)
    return produced[:count]


def check(made: list[GeneratedDocument]) -> None:
    """Raise if a key is missing from its answer or text, or if a document has another size than promised."""
    for written_document in made:
        for question, answer, key in written_document.questions:
            if key not in answer or key not in written_document.text or (not key) != (answer == UNKNOWN):
                raise AssertionError(f"{question!r} {answer!r} {key!r} in {written_document.text!r}")
            if "{" in question + answer + written_document.text or "a(n)" in question + answer + written_document.text:
                raise AssertionError(f"an unfilled slot: {question!r} {answer!r} in {written_document.text!r}")
        if not 60 <= len(written_document.text.split()) <= 250:
            raise AssertionError(f"{len(written_document.text.split())} words: {written_document.text!r}")
        if sum(not key for _, _, key in written_document.questions) != 2 or len(written_document.questions) < 7:
            raise AssertionError(f"too few questions: {written_document.questions!r}")


DOMAINS = (HERE / "worlds.txt").read_text(encoding="utf-8")
