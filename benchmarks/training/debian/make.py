"""Makes `documents/` from three packages of Debian 12; and passages of Markdown, also for smollm2's adapter.

apt-get download debian-handbook debian-faq python3.11-doc
for package in *.deb; do dpkg-deb -x $package unpacked; done
python -m ragkv.benchmarks.training.debian.make unpacked

The documents are HTML pages as Markdown, with the text of the page.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lxml import html

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


@dataclass(frozen=True)
class MarkdownPassage:
    document: str
    heading: str
    text: str

    @property
    def chunk(self) -> str:
        return f"{self.heading}\n\n{self.text}"


def passages(document: str, text: str) -> Iterator[MarkdownPassage]:
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
                yield MarkdownPassage(document, heading, "\n\n".join(held))
            held, heading = [], block.lstrip("# ")
            title = title or heading
            heading = heading if heading == title else f"{title}: {heading}"
            continue
        begins = block.startswith("**")
        size = sum(map(len, held))
        if held and (size + len(block) > LONG or (begins and size > LONG // 3)) and not held[-1].startswith("**"):
            yield MarkdownPassage(document, heading, "\n\n".join(held))
            held = []
        held.append(block)
    if held:
        yield MarkdownPassage(document, heading, "\n\n".join(held))


if __name__ == "__main__":
    make_documents(Path(sys.argv[1]))
