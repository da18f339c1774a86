"""Makes the training data of smollm2's adapter, and puts the adapter that was trained on it into the package.

mkdir debs && cd debs
apt-get download gnome-user-docs gnucash-docs installation-guide-amd64 apache2-doc git-doc aptitude-doc-en \
    postgresql-doc-15 debian-policy valgrind
for package in *.deb; do dpkg-deb -x $package ../unpacked; done
python -m ragkv.benchmarks.training.smollm2.adapter train unpacked build/smollm2  # again: goes on where it stopped
python -m ragkv.benchmarks.training.smollm2.adapter bundle build/smollm2/tuned  # in bfloat16: 10 MB

The data are `train.jsonl` and `heldout.jsonl`, lines of several questions about the same passages (docs/finetune.md).
The questions come from three places: `written.jsonl` (written after reading a passage of these packages),
`documents.jsonl` (short documents that were written for this, with their questions; `paraphrases.jsonl` has the same
questions in other words, and more questions with longer answers) and `worlds.py` (generated ones).
None of these documents is among those of `benchmarks/training/debian` or `examples/documents`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lxml import etree

from ragkv.benchmarks.training.debian.make import page
from ragkv.benchmarks.training.debian.make import passages as cut_passages
from ragkv.benchmarks.training.smollm2.worlds import documents as generated
from ragkv.mini import smollm2_adapter_path
from ragkv.model.checkpoint import ADAPTER

HERE = Path(__file__).parent
UNKNOWN = "The documents do not say."
MOST = 700
"""Characters of passages per row: two to four times as many."""
HELDOUT = 12
"""One passage or document in this many is held out."""
SHARE = Path("usr/share")
_MALLARD = ("help/C/gnome-help", "help/C/system-admin-guide")
_HTML = (
    ("doc/gnucash-docs/gnucash-guide-en", "gnucash-guide", "*.html"),
    ("doc/gnucash-docs/gnucash-help-en", "gnucash-help", "*.html"),
    ("doc/installation-guide-amd64/en", "installation-guide", "*.html"),
    ("doc/apache2-doc/manual/en", "apache2", "*.html"),
    ("doc/apache2-doc/manual/en/howto", "apache2", "*.html"),
    ("doc/apache2-doc/manual/en/misc", "apache2", "*.html"),
    ("doc/apache2-doc/manual/en/ssl", "apache2", "*.html"),
    ("doc/apache2-doc/manual/en/programs", "apache2", "*.html"),
    ("doc/git-doc", "git", "git*.html"),
    ("doc/aptitude/html/en", "aptitude", "*.html"),
    ("doc/valgrind/html", "valgrind", "*.html"),
    ("doc/postgresql-doc-15/html", "postgresql", "*.html"),
    ("doc/debian-policy", "debian-policy", "**/*.html"),
)
LONG_ANSWER = 100
"""An answer of more characters may say more than its key: its numbers and names must all be in the chunk."""
_NAMES = re.compile(r"\d[\d.,:]*(?<![.,:])|(?<=[a-z,] )[A-Z]\w+")
_SPACE = re.compile(r"\s+")
_ADAPTER_SETTINGS = ("peft_type", "task_type", "r", "lora_alpha", "lora_dropout", "bias", "target_modules")
CHUNKS = 4
"""Chunks per question of new indexes: with 8, an earlier adapter refused far fewer of the unanswerable questions."""


class Asked(NamedTuple):
    """A question; `key` is the text that its passage and its answer share, empty if nothing answers it. `paraphrases`
    ask the same with other words than those of the passage.
    """

    question: str
    answer: str
    key: str
    paraphrases: tuple[str, ...] = ()

    def wordings(self, rng: random.Random, count: int) -> list[str]:
        """`count` ways to ask, the first four times of ten as it is written, the others paraphrased, if there are."""
        ways = rng.sample(self.paraphrases, len(self.paraphrases))
        ways.insert(0 if rng.random() < 0.4 else min(count, len(ways)), self.question)
        return ways[:count]


class PassageSource(NamedTuple):
    """Passages of one document, each with the questions that it answers, and questions that it leaves open."""

    passages: tuple[tuple[str, tuple[Asked, ...]], ...]
    unanswered: tuple[Asked, ...]


def mallard(path: Path) -> str:
    """A page of GNOME's help as Markdown."""
    root = etree.parse(str(path), etree.XMLParser(resolve_entities=False, recover=True)).getroot()
    blocks: list[str] = []

    def text(element: Any) -> str:
        return _SPACE.sub(" ", "".join(element.itertext())).strip() if isinstance(element.tag, str) else ""

    def walk(element: Any, level: int) -> None:
        for child in element:
            tag = child.tag.split("}")[-1] if isinstance(child.tag, str) else "comment"
            if tag == "title":
                blocks.append("#" * level + " " + text(child))
            elif tag == "p":
                blocks.append(text(child))
            elif tag == "item":
                blocks.append(f"- {text(child)}")
            elif tag == "tr":
                blocks.append("| " + " | ".join(text(cell) for cell in child if isinstance(cell.tag, str)) + " |")
            elif tag in ("code", "screen"):
                blocks.append("```\n" + "".join(child.itertext()).strip() + "\n```")
            elif tag not in ("info", "comment", "links", "media"):
                walk(child, level + (tag == "section"))

    walk(root, 1)
    return "\n\n".join(block for block in blocks if block.strip("#- |")) + "\n"


def pages(unpacked: Path) -> Iterator[tuple[str, str]]:
    """The packages' pages as Markdown, with their names."""
    for folder in _MALLARD:
        name = folder.rpartition("/")[2].replace("system-admin-guide", "gnome-admin")
        for path in sorted((unpacked / SHARE / folder).glob("*.page")):
            yield f"{name}/{path.stem}", mallard(path)
    for folder, name, pattern in _HTML:
        for path in sorted((unpacked / SHARE / folder).glob(pattern)):
            if path.is_file() and not path.name.startswith(("_", "search", "genindex")):
                try:
                    yield f"{name}/{path.stem}", page(path)
                except (TypeError, etree.ParserError) as error:  # a page without a body
                    print(f"left out: {path} ({error})", file=sys.stderr)


def passages_of(unpacked: Path) -> dict[str, str]:
    """The passages of the packages by id: the page's name and the number of the passage in it."""
    by_id: dict[str, str] = {}
    for name, text in pages(unpacked):
        for number, passage in enumerate(cut_passages(name, text)):
            if len(passage.text) >= 150 and len(passage.chunk) <= 1600:
                by_id.setdefault(f"{name}#{number}", passage.chunk)
    return by_id


def written(passages: dict[str, str]) -> Iterator[PassageSource]:
    """The questions about real text, a source for each passage."""
    asked: dict[str, list[Asked]] = {}
    for line in (HERE / "written.jsonl").read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        asked.setdefault(found["id"], []).append(Asked(found["question"], found["answer"], found["key"]))
    for name, some in asked.items():
        if name not in passages:
            print(f"no such passage: {name}", file=sys.stderr)
            continue
        answered = tuple(one for one in some if one.key)
        yield PassageSource(((passages[name], answered),), tuple(one for one in some if not one.key))


def cut(rng: random.Random, title: str, text: str) -> list[str]:
    """A document in chunks like those of an ingest: cut at headings and paragraphs, up to a length."""
    most = rng.choice((500, 800, 1100, 1100))
    chunks: list[str] = []
    held = ""
    for block in text.strip().split("\n\n"):
        if held and (len(held) + len(block) > most or (block.startswith("#") and len(held) > most // 2)):
            chunks.append(held)
            held = ""
        held += ("\n\n" if held else "") + block
    chunks.append(held)
    named = rng.random() < 0.5  # a retrieved chunk may be the only one of its document
    return [chunk if not number or not named else f"{title}\n\n{chunk}" for number, chunk in enumerate(chunks)]


def placed(rng: random.Random, title: str, text: str, questions: Sequence[Asked]) -> PassageSource:
    """A document in chunks, each question with the one chunk that contains its key; other questions are dropped."""
    chunks = cut(rng, title, text)
    answered: list[list[Asked]] = [[] for _ in chunks]
    for question in questions:
        names = _NAMES.findall(question.answer) if len(question.answer) > LONG_ANSWER else []
        holding = [
            number
            for number, chunk in enumerate(chunks)
            if question.key and question.key.lower() in chunk.lower() and all(name in chunk for name in names)
        ]
        if len(holding) == 1:
            answered[holding[0]].append(question)
    return PassageSource(
        tuple((chunk, tuple(some)) for chunk, some in zip(chunks, answered, strict=True)),
        tuple(question for question in questions if not question.key),
    )


def documents(rng: random.Random) -> Iterator[PassageSource]:
    """The short documents that were written for this."""
    paraphrases: dict[tuple[str, str], list[str]] = {}
    longer: dict[str, list[Asked]] = {}
    more = HERE / "paraphrases.jsonl"
    for line in more.read_text(encoding="utf-8").splitlines() if more.exists() else ():
        record = json.loads(line)
        name = record["title"], record["question"]
        if "answer" in record:
            longer.setdefault(record["title"], []).append(Asked(name[1], record["answer"], record["key"]))
        paraphrases.setdefault(name, []).extend(record.get("paraphrases", ()))
    for line in (HERE / "documents.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        questions = [Asked(one["question"], one["answer"], one["key"]) for one in record["questions"]]
        questions = [
            one._replace(paraphrases=tuple(paraphrases.get((record["title"], one.question), ())))
            for one in (*questions, *longer.get(record["title"], ()))
        ]
        yield placed(rng, record["title"], record["text"], questions)


def worlds(rng: random.Random, count: int) -> Iterator[PassageSource]:
    """Generated documents."""
    for document in generated(rng.randrange(1 << 30), count):
        yield placed(rng, document.title, document.text, [Asked(*one) for one in document.questions])


def rows(rng: random.Random, sources: Sequence[PassageSource], others: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each source: a few of its passages among others of the same kind, with up to twenty questions.

    In a quarter of the rows one of these passages is missing, and up to three questions ask what it answers.
    """
    off_topic = [question for source in sources for _, some in source.passages for question in some]
    for source in sources:
        held = [(text, some) for text, some in source.passages if some]
        rng.shuffle(held)
        held = held[: rng.choice((1, 2, 2, 3, 3))]
        lost = held.pop()[1] if len(held) > 1 and rng.random() < 0.25 else ()
        texts = [text for text, _ in held]
        asked = [question for _, some in held for question in some]
        asked = rng.sample(asked, min(len(asked), 10))
        open_ = rng.sample(lost, min(len(lost), 3))
        open_ += rng.sample(source.unanswered, min(len(source.unanswered), rng.choice((1, 1, 2))))
        if rng.random() < 0.3:
            stranger = rng.choice(off_topic)
            if not any(stranger.key.lower() in text.lower() for text, _ in source.passages):
                open_.append(stranger)
        keys = [question.key.lower() for question in (*asked, *open_) if question.key]
        # passages of the same document are the hardest distractors
        near = [text for text, _ in source.passages if text not in texts]
        near = rng.sample(near, min(len(near), rng.choice((0, 1, 2))))
        count, room = rng.choice((1, 2, 2, 3, 3, 4)), rng.choice((2, 2, 3, 4)) * MOST
        for text in (*near, *rng.sample(others, 12)):
            holds = any(key in text.lower() for key in keys)
            if not holds and text not in texts and sum(map(len, texts)) + len(text) <= room and len(texts) < count:
                texts.append(text)
        if not asked:
            continue
        rng.shuffle(texts)
        answered = [(way, question.answer) for question in asked for way in question.wordings(rng, 3)]
        answered = rng.sample(answered, min(len(answered), 16))
        open_ = rng.sample(open_, min(len(open_), max(1, len(answered) // 5)))  # a sixth of all questions
        pairs = [*answered, *((way, UNKNOWN) for question in open_ for way in question.wordings(rng, 1))]
        rng.shuffle(pairs)
        yield {"questions": [{"prompt": ask, "response": answer} for ask, answer in pairs], "blocks": texts}


def joined(rng: random.Random, sources: Sequence[PassageSource], count: int) -> list[PassageSource]:
    """`count` sources each as one, since a passage has only a few questions."""
    mixed = rng.sample(sources, len(sources))
    groups = [mixed[start : start + count] for start in range(0, len(mixed), count)]
    return [
        PassageSource(
            tuple(held for one in group for held in one.passages), tuple(q for one in group for q in one.unanswered)
        )
        for group in groups
    ]


def make_data(unpacked: Path, output: Path, rounds: int) -> None:
    """Write both files. Each round asks about all passages again, beside others, and about new generated documents."""
    rng = random.Random(0)
    passages = passages_of(unpacked)
    real, own, invented = list(written(passages)), list(documents(rng)), list(worlds(rng, 500 * rounds))
    kinds = sorted({name.partition("/")[0] for name in passages})
    # held-out passages are never seen in training, not even as distractors
    unseen = {text for source in real[::HELDOUT] for text, _ in source.passages}
    by_kind = [[text for name, text in passages.items() if name.startswith(k) and text not in unseen] for k in kinds]
    prose = [rng.choice(texts) for texts in by_kind * 150 * rounds]
    train: list[dict[str, Any]] = []
    heldout: list[dict[str, Any]] = []
    for sources, times in ((real, 3 * rounds), (own, 6 * rounds), (invented, 1)):
        for _ in range(times):
            cut_anew = list(documents(rng)) if sources is own else sources
            learned = [source for number, source in enumerate(cut_anew) if number % HELDOUT]
            pool = [text for source in learned for text, _ in source.passages]
            if sources is real:
                pool, learned = [*prose, *pool], joined(rng, learned, 3)
            elif sources is own:
                learned = joined(rng, learned, 2)
            train += rows(rng, learned, pool)
        held = sources[::HELDOUT]
        pool = [text for source in held for text, _ in source.passages]
        heldout += list(rows(rng, held, [*prose, *pool] if sources is real else pool))[:40]
    rng.shuffle(train)
    output.mkdir(parents=True, exist_ok=True)
    for name, lines in (("train", train), ("heldout", heldout)):
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (output / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{name}: {len(lines)} rows, {sum(len(line['questions']) for line in lines)} questions")


def train(unpacked: Path, output: Path, rounds: int, steps: int | None) -> None:
    """Make the data unless they are there, and train the bundled adapter on; a stopped run is resumed."""
    import torch

    from ragkv.finetune.block import finetune_block
    from ragkv.finetune.config import BlockTuneConfig

    if not (output / "train.jsonl").exists():
        make_data(unpacked, output, rounds)
    gpu = torch.cuda.is_available()
    config = BlockTuneConfig(
        model="smollm2-plain",
        adapter=smollm2_adapter_path(),
        data=output / "train.jsonl",
        eval_data=output / "heldout.jsonl" if gpu else None,
        output=output / "tuned",
        steps=steps,
        batch=16 if gpu else 1,
        gradient_accumulation=1 if gpu else 4,
        learning_rate=6e-4,
        over="prefixed",
        dtype="bfloat16",
        checkpoint_every=50 if gpu else 10,
    )
    finetune_block(config, on_progress=lambda figures: print(json.dumps(figures), flush=True))


def bundle(tuned: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    target = smollm2_adapter_path()
    target.mkdir(exist_ok=True)
    weights = load_file(tuned / "adapter" / ADAPTER)
    save_file({name: weight.to(torch.bfloat16) for name, weight in weights.items()}, target / ADAPTER, {"format": "pt"})
    found = json.loads((tuned / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    settings = {name: found[name] for name in _ADAPTER_SETTINGS} | {
        "base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct"
    }
    settings["target_modules"] = sorted(settings["target_modules"])
    (target / "adapter_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    made = json.loads((tuned / "ragkv.json").read_text(encoding="utf-8"))
    paths = ("data", "output", "eval_data", "adapter")
    recipe = {name: value for name, value in made["recipe"].items() if name not in paths}
    declared = {**made, "top_k": CHUNKS, "recipe": recipe}
    (target / "ragkv.json").write_text(json.dumps(declared, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="The training data of smollm2's adapter, and its bundling.")
    commands = parser.add_subparsers(required=True)
    for name, run, purpose in (
        ("data", make_data, "write train.jsonl and heldout.jsonl"),
        ("train", train, "write them if they are missing, and train the bundled adapter on"),
    ):
        command = commands.add_parser(name, help=purpose)
        command.add_argument("unpacked", type=Path, help="folder of the unpacked packages")
        command.add_argument("output", type=Path)
        command.add_argument("--rounds", type=int, default=3, help="each asks about all passages beside others (3)")
        command.set_defaults(run=run)
    command.add_argument("--steps", type=int, help="steps of 16 rows on a GPU, 4 on a processor (default: all rows)")
    put = commands.add_parser("bundle", help="put a tuned adapter into the package")
    put.add_argument("tuned", type=Path, help="the output folder of ragkv finetune block")
    put.set_defaults(run=bundle)
    chosen = vars(parser.parse_args())
    chosen.pop("run")(**chosen)


if __name__ == "__main__":
    main()
