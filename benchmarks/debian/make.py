"""Makes `documents/` from three packages of Debian 12, and `questions.jsonl` from `documents/` and `written.jsonl`.

apt-get download debian-handbook debian-faq python3.11-doc
for package in *.deb; do dpkg-deb -x $package unpacked; done
python benchmarks/debian/make.py documents unpacked
python benchmarks/debian/make.py questions unpacked

The documents are HTML pages as Markdown, with the text of the page. Some questions are written by hand, and some are
generated from the documents' structure. Pages of other Python modules, which are not among the documents, give the
unanswerable questions. Each question has four passages to read: those that it needs, and those that BM25 ranks highest
among passages without the answer.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import bm25s
from lxml import html

from ragkv.doctor.io import normal

T = TypeVar("T")
HERE = Path(__file__).parent
PAGES = {
    "debian-handbook": (
        "usr/share/doc/debian-handbook/html/en-US",
        "existing-setup network-infrastructure packaging-system sect.apparmor sect.apt-cache sect.apt-file"
        " sect.asynchronous-task-scheduling-anacron sect.automatic-upgrades sect.backup"
        " sect.becoming-package-maintainer sect.computer-layers sect.config-printing sect.dhcp"
        " sect.domain-name-servers sect.dynamic-routing sect.filesystem-hierarchy sect.follow-debian-news"
        " sect.foundation-documents sect.hotplug sect.how-to-migrate sect.inetd sect.ipv6"
        " sect.kernel-role-and-tasks sect.main-desktop-tools sect.nfs-file-server sect.package-authentication"
        " sect.quality-of-service sect.quotas sect.release-lifecycle sect.remote-login sect.rights-management"
        " sect.role-of-distributions sect.syslog sect.task-scheduling-cron-atd sect.ubuntu"
        " sect.user-group-databases sect.why-debian sect.windows-emulation the-debian-project",
    ),
    "debian-faq": (
        "usr/share/doc/debian/FAQ",
        "basic-defs.en choosing.en compatibility.en customizing.en ftparchives.en getting-debian.en kernel.en"
        " nextrelease.en pkg-basics.en pkgtools.en redistributing.en software.en support.en uptodate.en",
    ),
    "python": (
        "usr/share/doc/python3.11/html",
        "glossary library/bisect library/calendar library/contextlib library/copy library/csv library/difflib"
        " library/exceptions library/fileinput library/fnmatch library/getpass library/gzip library/hashlib"
        " library/heapq library/hmac library/html library/logging.handlers library/mimetypes library/pprint"
        " library/queue library/random library/sched library/secrets library/shelve library/shutil library/signal"
        " library/tempfile library/textwrap library/time library/timeit library/uuid library/venv library/zlib",
    ),
}
"""For each package, its folder and the pages that are taken from it."""
_LEFT_OUT = (
    "nav",
    "navheader",
    "navfooter",
    "docnav",
    "headerlink",
    "indexterm",
    "footer",
    "related",
    "sphinxsidebar",
    "toc",
)
_HEADINGS = {"h1": 1, "h2": 2, "h3": 3, "h4": 4}
_SET = ("p", "div", "dl", "ul", "ol", "table", "pre")
_SPACE = re.compile(r"\s+")


def text_of(element: Any) -> str:
    """All text of an element, without the elements that are left out."""
    parts = [element.text or ""]
    for child in element:
        parts += ["" if left_out(child) else text_of(child), child.tail or ""]
    return "".join(parts)


def left_out(element: Any) -> bool:
    kinds = (element.get("class") or "").split()
    return not isinstance(element.tag, str) or element.tag in ("script", "style") or any(k in kinds for k in _LEFT_OUT)


def blocks(element: Any) -> Iterator[str]:
    """The element as Markdown blocks, in order."""
    for child in element:
        if left_out(child):
            continue
        kinds = (child.get("class") or "").split()
        if child.tag in _HEADINGS:
            yield f"{'#' * _HEADINGS[child.tag]} {''.join(flat(text_of(child)))}"
        elif child.tag == "p" and kinds == ["title"]:
            yield "".join(["**", *flat(text_of(child)), "**"])
        elif child.tag == "pre":
            yield "```\n" + text_of(child).strip("\n") + "\n```"
        elif child.tag == "dt":
            yield "".join(["**", *flat(text_of(child)), "**"])
        elif child.tag in ("p", "dd", "li") or "para" in kinds:
            found = list(contents(child))
            if child.tag == "li" and found:
                found[0] = f"- {found[0]}"
            yield from found
        elif child.tag == "tr":
            yield "| " + " | ".join("".join(flat(text_of(cell))) for cell in child) + " |"
        else:
            yield from blocks(child)


def contents(element: Any) -> Iterator[str]:
    """The blocks of a paragraph, a list item or a definition: its text, cut where a list or a listing begins."""
    run = element.text or ""
    for child in element:
        if child.tag in _SET:
            yield from flat(run)
            run = ""
            holder = html.Element("div")
            holder.append(deepcopy(child))
            holder[0].tail = None
            yield from blocks(holder)
        elif not left_out(child):
            run += text_of(child)
        run += child.tail or ""
    yield from flat(run)


def flat(text: str) -> list[str]:
    """The text on one line, if there is any."""
    found = _SPACE.sub(" ", text.replace("¶", "")).strip()
    return [found] if found else []


def page(path: Path) -> str:
    root = html.fromstring(path.read_bytes(), parser=html.HTMLParser(encoding="utf-8"))
    main = next(iter(root.xpath("//div[@role='main']")), None)
    main = root.find("body") if main is None else main
    found = [block for block in blocks(main) if block.strip("#*-| ")]
    text = "\n\n".join(found)
    text = re.sub(r"(?<=\|)\n\n(?=\|)", "\n", text)
    return text.replace("\xa0", " ") + "\n"


def make_documents(unpacked: Path) -> None:
    for package, (folder, names) in PAGES.items():
        for name in names.split():
            target = HERE / "documents" / package / f"{name.removeprefix('library/').removesuffix('.en')}.md"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(page(unpacked / folder / f"{name}.html"), encoding="utf-8")


LONG = 700
"""A passage of more characters than this ends with its current block."""
CHUNKS = 4
REFUSALS = (
    *("do not say", "does not say", "do not mention", "does not mention", "not mentioned", "do not provide"),
    *("does not provide", "not provided", "do not specify", "does not specify", "not specified", "do not state"),
    *("does not state", "not stated", "do not contain", "does not contain", "no information", "not enough information"),
    *("cannot be answered", "do not know", "don't know", "is not given", "is unknown"),
)
"""Phrases of an answer to a question that no passage answers: any of these counts."""
LIMITS = {"default": 70, "version": 60, "function": 80, "constant": 45, "definition": 75, "date": 25}
"""The most questions of each kind."""
ABSENT = ("json", "zipfile", "configparser", "socketserver", "poplib", "smtplib", "tarfile", "bz2", "shlex", "cmd")


@dataclass(frozen=True)
class Passage:
    document: str
    heading: str
    text: str

    @property
    def chunk(self) -> str:
        return f"{self.heading}\n\n{self.text}"


@dataclass(frozen=True)
class Made:
    """A question; its passages contain `evidence`, and the last of them contains an answer."""

    kind: str
    question: str
    answers: tuple[str, ...]
    documents: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()


def passages(document: str, text: str) -> Iterator[Passage]:
    """The document in order, cut at headings, and between blocks once it is long enough."""
    title = heading = ""
    held: list[str] = []
    listing = ""
    for block in text.rstrip("\n").split("\n\n"):
        if listing or (block.startswith("```") and not block.endswith("```")):  # a listing that contains empty lines
            listing = f"{listing}\n\n{block}" if listing else block
            if not block.endswith("```"):
                continue
            block, listing = listing, ""
        if block.startswith("#"):
            if held:
                yield Passage(document, heading, "\n\n".join(held))
            held, heading = [], block.lstrip("# ")
            title = title or heading
            heading = heading if heading == title else f"{title}: {heading}"
            continue
        begins = block.startswith("**")
        size = sum(map(len, held))
        if held and (size + len(block) > LONG or (begins and size > LONG // 3)) and not held[-1].startswith("**"):
            yield Passage(document, heading, "\n\n".join(held))
            held = []
        held.append(block)
    if held:
        yield Passage(document, heading, "\n\n".join(held))


_SIGNATURE = re.compile(r"\*\*(?:class |classmethod |staticmethod )?([A-Za-z_][\w.]*)\((.*)\)\*\*")
_CONSTANT = re.compile(r"\*\*(\w+\.[A-Z_][A-Z0-9_]+)\*\*")
_EXCEPTION = re.compile(r"\*\*exception (\w+)\*\*")
_TERM = re.compile(r"\*\*([a-z][\w .-]{2,30})\*\*")
_ITEM = re.compile(r"- ([\w/.~*+ -]{2,28}): ([a-zA-Z][^\n]{15,150}?)[;.,]?")
_ROW = re.compile(r"\| (%\w) \| ([^|]{15,90}?)\.? \|")
_NEW = re.compile(r"New in version (3\.\d+)\.?")
_YEAR = re.compile(r"\b(19[6-9]\d|20[0-2]\d)\b")
_SENTENCE = re.compile(r"(?<=[.!?]) (?=[A-Z“])")


def first_sentence(text: str) -> str:
    return _SENTENCE.split(text)[0].rstrip(".:")


def lower(text: str) -> str:
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def pick(options: tuple[T, ...], key: str) -> T:
    """One of the wordings, always the same for a key."""
    return options[int(hashlib.sha256(key.encode()).hexdigest(), 16) % len(options)]


def of_python(document: str, found: list[str]) -> Iterator[Made]:
    """Defaults, versions, functions, constants, exceptions and terms of a page of Python's documentation."""
    module = Path(document).stem
    for block, after in pairwise(found):
        says = first_sentence(after)
        if match := _SIGNATURE.fullmatch(block):
            name, inside = match.groups()
            evidence = block.strip("*")
            for parameter, value in re.findall(r"(\w+)=('[^']*'|-?[\w.]+(?:\(\w+\))?)", inside):
                if len(value) > 1 and value not in ("None", "True", "False"):
                    question = pick(
                        (
                            "What is the default of {p} in {n}()?",
                            "If I call {n}() without {p}, which value is used for it?",
                            "Which value does the parameter {p} of {n}() have by default?",
                            "{n}() takes a parameter {p}. What is it if I leave it out?",
                            "What does {p} default to when {n}() is called?",
                            "Tell me the default value of {n}()'s argument {p}.",
                        ),
                        name + parameter,
                    ).format(p=parameter, n=name)
                    yield Made("default", question, (value.strip("'"),), (document,), (evidence,))
            short = name.rpartition(".")[2]
            if 25 < len(says) < 150 and says[0].isupper() and short.lower() not in says.lower() and "." in name:
                question = pick(
                    (
                        "Which function or class of Python's {m} fits this description: {s}?",
                        "I need this from the {m} module: {s}. What is it called?",
                        "What in the module {m} does the following: {s}?",
                        "Name what {m} offers for this: {s}.",
                        "In {m}, what is there to {l}?",
                        "Which part of {m} is for this purpose: “{s}”?",
                    )
                    if not says.startswith(("Return", "Get", "Copy", "Create", "Set", "Remove", "Move", "Register"))
                    else (
                        "Which function of {m} should I call to {l}?",
                        "I want to {l}. Which function of Python's {m} module does that?",
                        "What do I use from {m} in order to {l}?",
                        "Name the function in {m} that can {l}.",
                    ),
                    name,
                ).format(m=module, s=says, l=lower(says))
                yield Made("function", question, (short,), (document,), (after,))
        elif match := _CONSTANT.fullmatch(block):
            short = match[1].rpartition(".")[2]
            if 15 < len(says) < 160 and short not in says:
                question = pick(
                    (
                        "Which constant of the module {m} means: {s}?",
                        "What is the name of {m}'s constant for this: {s}?",
                        "In Python's {m} module, which constant is described as “{s}”?",
                        "Which name from {m} stands for the following: {s}?",
                    ),
                    short,
                ).format(m=module, s=says)
                yield Made("constant", question, (short,), (document,), (after,))
        elif (match := _EXCEPTION.fullmatch(block)) and says.startswith("Raised ") and match[1] not in says:
            question = pick(
                (
                    "Which exception is {s}?",
                    "What built-in exception of Python is {s}?",
                    "Name the exception that is {s}.",
                    "How is Python's exception called that is {s}?",
                ),
                match[1],
            ).format(s=lower(says))
            yield Made("definition", question, (match[1],), (document,), (after,))
        elif module == "glossary" and (match := _TERM.fullmatch(block)):
            term = match[1]
            if 30 < len(says) < 170 and term.lower() not in says.lower():
                question = pick(
                    (
                        "What does Python's glossary call this: {s}?",
                        "Which term means “{s}” in Python?",
                        "What is the word for the following in Python: {s}?",
                        "{s} — which term is defined like this?",
                        "Python programmers have a term for this: {s}. Which one?",
                    ),
                    term,
                ).format(s=says)
                yield Made("definition", question, (term,), (document,), (after,))
    yield from versions(document, found)
    for block in found:
        for code, says in _ROW.findall(block):
            question = pick(
                (
                    "Which directive of strftime gives this: {s}?",
                    "What do I write in a time format for: {s}?",
                    "Which format code stands for “{s}”?",
                ),
                code,
            ).format(s=says.strip())
            yield Made("constant", question, (code,), (document,), (f"| {code} | {says}",))


def versions(document: str, found: list[str]) -> Iterator[Made]:
    """Versions in which something was added or changed."""
    name = ""
    for block in found:
        if match := _SIGNATURE.fullmatch(block):
            name, signature = match[1], block.strip("*")
        elif block.startswith(("#", "**")):
            name = ""
        elif name and (match := _NEW.fullmatch(block)):
            question = pick(
                (
                    "Since which version of Python is there {n}()?",
                    "In which Python version was {n}() added?",
                    "Which release of Python brought {n}()?",
                    "From which Python version on can I use {n}()?",
                ),
                name,
            ).format(n=name)
            yield Made("version", question, (match[1],), (document,), (signature,))
        elif name and (match := re.fullmatch(r"Changed in version (3\.\d+): Added the (\w+) parameter\.", block)):
            question = pick(
                (
                    "Which Python version gave {n}() its parameter {p}?",
                    "Since when (which version of Python) does {n}() take {p}?",
                    "In what release was the parameter {p} added to {n}()?",
                ),
                name,
            ).format(n=name, p=match[2])
            yield Made("version", question, (match[1],), (document,), (signature,))


def of_debian(document: str, found: list[str]) -> Iterator[Made]:
    """Items of lists, and the years in running text, of a page of the handbook or the FAQ."""
    heading = ""
    for block in found:
        if block.startswith("#"):
            heading = re.sub(r"^[#\s]*[\dAB]*[\d.]*\.? *", "", block).rstrip("?")
        elif match := _ITEM.fullmatch(block):
            name, says = match.groups()
            if name.lower() not in says.lower() and "--" not in says:
                question = pick(
                    (
                        "On “{h}”: what is this: {s}?",
                        "Under “{h}”, what has this description: {s}?",
                        "Which item, regarding “{h}”, is for the following: {s}?",
                        "{h}: which of them is described by “{s}”?",
                        "What is described as “{s}” (the topic is “{h}”)?",
                    ),
                    name,
                ).format(h=heading, s=says)
                yield Made("definition", question, (name,), (document,), (block.removeprefix("- "),))
        elif match := re.fullmatch(r"- (\w+) \(Debian ([\d.]+)\) was (.+?)[,.]", block):
            name, number, who = match.groups()
            question, answer = pick(
                (
                    (f"What is the codename of Debian {number}?", name),
                    (f"Which release of Debian was named after {who}?", name),
                    (f"Which number did the Debian release have that was called {name}?", number),
                ),
                name,
            )
            yield Made("definition", question, (answer,), (document,), (block.removeprefix("- "),))
        elif not block.startswith(("```", "**", "|")):
            for sentence in _SENTENCE.split(block):
                if len(years := _YEAR.findall(sentence)) == 1 and 50 < len(sentence) < 260:
                    gap = sentence.replace(years[0], "____").removeprefix("- ")
                    question = pick(
                        (
                            "Which year belongs in the gap: “{s}”",
                            "What year is left out here? {s}",
                            "Fill in the year: “{s}”",
                        ),
                        gap,
                    ).format(s=gap)
                    yield Made("date", question, (years[0],), (document,), (sentence.removeprefix("- "),))


def absent(python: Path, texts: dict[str, str]) -> Iterator[Made]:
    """Questions about modules that are not among the documents, and whose names do not occur in them."""
    everything = "\n".join(texts.values())
    for module in ABSENT:
        for made in of_python(f"python/{module}.md", page(python / "library" / f"{module}.html").split("\n\n")):
            name = re.search(rf"\b{module}\.\w+(?:\.\w+)?", made.question)
            if made.kind in ("default", "version") and name and name[0] not in everything:
                yield Made("unanswerable", made.question, REFUSALS)


def written(texts: dict[str, str]) -> Iterator[Made]:
    for line in (HERE / "written.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield Made(
            row["kind"],
            row["question"],
            tuple(row.get("answers", REFUSALS)),
            tuple(row.get("sources", ())),
            tuple(row.get("evidence", ())),
        )


class Search:
    """Passages by document, and a BM25 search over them."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.passages = [passage for name, text in texts.items() for passage in passages(name, text)]
        self._bm25 = bm25s.BM25()
        self._bm25.index(self._tokens([passage.chunk for passage in self.passages]), show_progress=False)

    def holding(self, documents: tuple[str, ...], evidence: str) -> list[Passage]:
        return [p for p in self.passages if p.document in documents and evidence in p.text]

    def like(self, question: str) -> list[Passage]:
        found, _ = self._bm25.retrieve(self._tokens([question]), k=100, show_progress=False)
        return [self.passages[int(i)] for i in found[0]]

    @staticmethod
    def _tokens(texts: list[str]) -> Any:
        return bm25s.tokenize(texts, stopwords="en", show_progress=False)


def row(made: Made, search: Search) -> dict[str, Any] | None:
    """A question as a JSON row; None unless exactly one passage has its evidence, and the evidence has the answer."""
    gold = []
    for evidence in made.evidence:
        held = search.holding(made.documents, evidence)
        if len(held) != 1:
            return None
        gold += [passage for passage in held if passage not in gold]
    answers = [normal(answer) for answer in made.answers]
    if gold and not any(answer in normal(passage.text) for passage in gold for answer in answers):
        return None
    others = [
        passage
        for passage in search.like(made.question)
        if passage not in gold and (not gold or not any(answer in normal(passage.chunk) for answer in answers))
    ]
    chosen = gold + others[: CHUNKS - len(gold)]
    if len(chosen) < CHUNKS:
        return None
    random.Random(made.question).shuffle(chosen)
    line: dict[str, Any] = {
        "id": hashlib.sha256(made.question.encode()).hexdigest()[:8],
        "kind": made.kind,
        "question": made.question,
        "answers": list(made.answers),
    }
    line |= {"sources": list(made.documents), "evidence": list(made.evidence)}
    if gold:
        line["needed"] = [i for i, passage in enumerate(chosen) if passage in gold]
    return {**line, "chunks": [passage.chunk for passage in chosen]}


def make_questions(unpacked: Path) -> None:
    python = unpacked / PAGES["python"][0]
    files = sorted((HERE / "documents").glob("*/*.md"))
    texts = {path.relative_to(HERE / "documents").as_posix(): path.read_text(encoding="utf-8") for path in files}
    search = Search(texts)
    rows = [line for made in written(texts) if (line := row(made, search))]
    made: dict[str, dict[str, Any]] = {}
    for name, text in texts.items():
        find = of_python if name.startswith("python/") else of_debian
        for each in find(name, text.split("\n\n")):
            if line := row(each, search):
                made.setdefault(each.question, line)
    for each in absent(python, texts):
        if line := row(each, search):
            made.setdefault(each.question, line)
    for kind, limit in (*LIMITS.items(), ("unanswerable", 40)):
        of_kind = [line for line in made.values() if line["kind"] == kind]
        random.Random(kind).shuffle(of_kind)
        rows += of_kind[:limit]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in rows)
    (HERE / "questions.jsonl").write_text(text, encoding="utf-8")
    kinds = [line["kind"] for line in rows]
    print(len(rows), {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)})


if __name__ == "__main__":
    {"documents": make_documents, "questions": make_questions}[sys.argv[1]](Path(sys.argv[2]))
