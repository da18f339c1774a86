"""Write examples/corpus and examples/questions.jsonl: one held-out world as Markdown, HTML and PDF documents.

Run it from anywhere: `python examples/build_corpus.py [--seed N] [--output FOLDER]`. It needs `pip install fpdf2`. The
output is a function of the seed alone; names come from the held-out split, so the mini model has never seen them.
"""

from __future__ import annotations

import argparse
import html
import json
import random
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from fpdf import FPDF

from ragkv.benchmarks.evaluation.worlds.world import World, WorldDocument, WorldQuestion

SEED = 11
SIZE = 60
CATALOGUE = "product-catalogue.pdf"
TWO_HOP = 4
ONE_HOP = {"company": 13, "person": 9, "town": 7, "product": 7}

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>body {{ font-family: serif; }} nav a {{ margin-right: 1em; }}</style>
</head>
<body>
<header><nav><a href="/">Home</a><a href="/towns">Towns</a><a href="/maps">Maps</a><a href="/contact">Contact</a>
<a href="/login">Sign in</a></nav></header>
<aside class="cookie-banner"><p>This site uses cookies. <button>Accept all</button></p></aside>
<main>
<article>
<h1>{title}</h1>
{body}
</article>
</main>
<footer><p>Copyright The Gazetteer. <a href="/terms">Terms of use</a> | <a href="/privacy">Privacy policy</a> |
Subscribe to our newsletter</p></footer>
<script>console.log("page view");</script>
</body>
</html>
"""


def slug(title: str) -> str:
    """Return a file name for a title: lower case, words joined by hyphens."""
    return "-".join(title.lower().split())


def home_of_people(world: World) -> dict[str, str]:
    """Return for every person the company whose file describes them: founded first, led second, else spread."""
    companies = [document.title for document in world.documents if document.kind == "company"]
    homes: dict[str, str] = {}
    for relation in ("person.founded", "person.leads"):
        for fact in world.facts:
            if fact.relation == relation:
                homes.setdefault(fact.subject, fact.value)
    people = [document.title for document in world.documents if document.kind == "person"]
    for index, person in enumerate(people):
        homes.setdefault(person, companies[index % len(companies)])
    return homes


def paragraphs(document: WorldDocument) -> list[str]:
    """Break a document into paragraphs of at most four sentences."""
    sentences = document.sentences
    middle = len(sentences) if len(sentences) <= 4 else (len(sentences) + 1) // 2
    return [" ".join(part) for part in (sentences[:middle], sentences[middle:]) if part]


def write_markdown(world: World, corpus: Path) -> dict[str, str]:
    """Write one file per company with its people as sections; return file name by entity."""
    homes = home_of_people(world)
    places: dict[str, str] = {}
    for company in (document for document in world.documents if document.kind == "company"):
        name = f"companies/{slug(company.title)}.md"
        parts = [f"# {company.title}", *paragraphs(company)]
        places[company.title] = name
        for person in (document for document in world.documents if homes.get(document.title) == company.title):
            parts += [f"## {person.title}", *paragraphs(person)]
            places[person.title] = name
        (corpus / name).write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return places


def write_html(world: World, corpus: Path) -> dict[str, str]:
    """Write the towns onto two pages with navigation, cookie banner and footer; return file name by town."""
    towns = [document for document in world.documents if document.kind == "town"]
    half = (len(towns) + 1) // 2
    places: dict[str, str] = {}
    for name, title, members in (
        ("towns-north.html", "Towns of the North", towns[:half]),
        ("towns-south.html", "Towns of the South", towns[half:]),
    ):
        body: list[str] = []
        for town in members:
            body.append(f"<h2>{html.escape(town.title)}</h2>")
            body += [f"<p>{html.escape(paragraph)}</p>" for paragraph in paragraphs(town)]
            places[town.title] = name
        (corpus / name).write_text(PAGE.format(title=title, body="\n".join(body)), encoding="utf-8")
    return places


def write_pdf(world: World, corpus: Path) -> dict[str, str]:
    """Write the product catalogue, three pages; return file name by product."""
    pdf = FPDF(format=(148, 210))
    pdf.set_creation_date(datetime(2026, 1, 1, tzinfo=UTC))
    pdf.set_title("Product catalogue")
    pdf.set_auto_page_break(auto=True, margin=15)
    pdf.add_page()
    pdf.set_font("Helvetica", "B", 18)
    pdf.multi_cell(0, 10, "Product catalogue", new_x="LMARGIN", new_y="NEXT")
    places: dict[str, str] = {}
    for product in (document for document in world.documents if document.kind == "product"):
        pdf.set_font("Helvetica", "B", 13)
        pdf.ln(4)
        pdf.multi_cell(0, 7, product.title, new_x="LMARGIN", new_y="NEXT")
        pdf.set_font("Helvetica", "", 11)
        pdf.multi_cell(0, 6, product.text, align="L", new_x="LMARGIN", new_y="NEXT")
        places[product.title] = CATALOGUE
    pdf.output(str(corpus / CATALOGUE))
    return places


def pick_questions(world: World, places: dict[str, str], seed: int) -> list[WorldQuestion]:
    """Choose the questions: every file is asked about, no fact twice, one wording each."""
    rng = random.Random(seed)
    kinds = {document.title: document.kind for document in world.documents}
    pool = list(world.questions)
    rng.shuffle(pool)
    chosen: list[WorldQuestion] = []
    used: dict[str, int] = dict.fromkeys(places.values(), 0)
    supports: set[str] = set()
    for kind, count in ONE_HOP.items():
        for _ in range(count):
            fits = [
                question
                for question in pool
                if question.hops == 1 and kinds[question.titles[0]] == kind and question.support[0] not in supports
            ]
            best = min(fits, key=lambda question: used[places[question.titles[0]]])
            used[places[best.titles[0]]] += 1
            supports.update(best.support)
            chosen.append(best)
    relations: set[str] = set()
    for question in pool:
        if question.hops == 2 and question.relation not in relations and len(relations) < TWO_HOP:
            relations.add(question.relation)
            chosen.append(question)
    return chosen


def lines(questions: Sequence[WorldQuestion], places: dict[str, str]) -> list[str]:
    """Return the questions as JSON lines; `document` holds the answer itself (the last hop)."""
    return [
        json.dumps(
            {
                "id": f"q{index:02d}",
                "question": question.question,
                "answers": [question.gold],
                "hops": question.hops,
                "document": places[question.titles[-1]],
            }
        )
        for index, question in enumerate(questions, start=1)
    ]


def build(seed: int, output: Path) -> None:
    """Replace `output/corpus` and `output/questions.jsonl`."""
    world = World.generate(seed, split="heldout", size=SIZE)
    corpus = output / "corpus"
    shutil.rmtree(corpus, ignore_errors=True)
    (corpus / "companies").mkdir(parents=True)
    places = write_markdown(world, corpus) | write_html(world, corpus) | write_pdf(world, corpus)
    questions = pick_questions(world, places, seed)
    (output / "questions.jsonl").write_text("\n".join(lines(questions, places)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--output", type=Path, default=Path(__file__).resolve().parent)
    arguments = parser.parse_args()
    build(arguments.seed, arguments.output)
