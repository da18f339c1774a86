"""Tasks that ragkv generates: questions about fictional worlds, many-shot labels, variables, and cloze questions.

The names are ones that no model has seen, so that an answer can come only from the chunks. Distractors are of the same
world. Many-shot labels follow APE Table 3, and the tasks in words of one token each follow APB Table 3.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Literal

from ragkv.errors import UsageError
from ragkv.evaluation.metrics import Example, Task
from ragkv.evaluation.tasks.ruler import cut, gathered, match_all, require, require_sizes
from ragkv.worlds import QuestionKind, Split, World, WorldDocument, WorldQuestion
from ragkv.worlds.questions import GROUPS, Shots, neutral_sentence, shot_text
from ragkv.worlds.text import asked, clozes, english_sentences, reference_texts, variable_list
from ragkv.worlds.world import listed

_WORLD_PATIENCE = 200  # consecutive worlds without a fitting question


def worlds(*, seed: int = 0, limit: int = 100, chunks: int = 8, split: Split = "heldout", kinds: str = "") -> Task:
    """Fictional worlds: a document per chunk, evidence among distractors of the same world; slices by kind of question.

    `kinds` selects the kinds, as in "one hop+two hops"; others are comparison, list (scored by the share that is given)
    and unanswerable. Every context is asked one question of each kind, about different facts, if its evidence fits into
    the chunks. Names of the `heldout` split occur in no training world.
    """
    require("chunks", chunks, 1, 1024)
    require("limit", limit, 1)
    wanted = [kind.strip() for kind in kinds.split("+") if kind.strip()]

    def context(number: int) -> list[Example]:
        world = World.generate(seed * 1_000_003 + number, split=split, size=max(24, chunks + 8))
        rng = random.Random(f"worlds:{seed}:{split}:{chunks}:{number}")
        return _world_context(rng, world, chunks, number, wanted)

    barren = f"worlds: no question of kind {kinds or 'any'} has its evidence in {chunks} chunks."
    examples = gathered(limit, context, patience=_WORLD_PATIENCE, barren=barren)
    return Task(name=f"worlds/{chunks}", metric="string_match_all", examples=examples, max_new_tokens=64, seed=seed)


def _world_context(rng: random.Random, world: World, chunks: int, number: int, wanted: Sequence[str]) -> list[Example]:
    """One question of each kind about one set of chunks in random order.

    Questions of one and two hops determine the documents; the other kinds are asked about the documents that result.
    """
    by_kind: dict[str, list[WorldQuestion]] = {}
    for question in world.questions:
        by_kind.setdefault(question.kind, []).append(question)
    hops = sorted(kind for kind in by_kind if not wanted or kind in wanted)
    turn = number % max(1, len(hops))  # the first kind has the most choice
    asked: list[WorldQuestion] = []
    titles: dict[str, None] = {}
    for kind in hops[turn:] + hops[:turn]:
        used = {sentence for question in asked for sentence in question.support}
        for question in rng.sample(by_kind[kind], len(by_kind[kind])):
            together = dict.fromkeys((*titles, *question.titles))
            if len(together) <= chunks and not used.intersection(question.support):
                asked.append(question)
                titles = together
                break
    rest = [document for document in world.documents if document.title not in titles]
    evidence = [world.document(title) for title in titles]
    chosen = evidence + rng.sample(rest, chunks - len(evidence))
    rng.shuffle(chosen)
    stated = world.stated([document.text for document in chosen])
    asked += [
        question
        for question in world.ask(rng, stated, 1)
        if question.kind not in by_kind and (not wanted or question.kind in wanted)
    ]
    return [_example(question, chosen, f"{number}-{place}") for place, question in enumerate(asked)]


def _example(question: WorldQuestion, chosen: Sequence[WorldDocument], name: str) -> Example:
    return Example(
        example_id=name,
        question=question.question,
        chunks=tuple(f"# {document.title}\n\n{document.text}" for document in chosen),
        answers=question.golds or (question.gold,),
        kind=question.kind,
        needed=tuple(
            at
            for at, document in enumerate(chosen)
            if any(sentence in document.sentences for sentence in question.support)
        ),
    )


_SENTENCES = 5  # most sentences per passage; with its heading about 60 tokens of the mini model
_CORE = 8  # related passages, which all questions of one hop, two hops and comparisons are about
_PASSAGE_PATIENCE = 40  # consecutive contexts without a question of the kind


def passages(
    *,
    seed: int = 0,
    limit: int = 100,
    chunks: int = 8,
    kind: QuestionKind = "one hop",
    pool: int = 0,
    per_context: int = 4,
    split: Split = "heldout",
) -> Task:
    """Questions of one `kind` about passages of a world, `per_context` of them for each context of `chunks` passages.

    The first 8 passages are related, so that chains and comparisons can be asked; the others are drawn from the same
    world. With the same `pool` (at least `chunks`), larger contexts contain the smaller ones, and the questions about
    the 8 passages are the same at every size. A list is scored by the share of its members that are named.
    """
    require("limit", limit, 1)
    require("per_context", per_context, 1)
    pool = pool or chunks
    require("pool", pool, chunks, 1024)
    require("chunks", chunks, 1, pool)
    examples = gathered(
        limit,
        lambda number: _passage_context(seed, number, chunks, kind, pool, per_context, split),
        patience=_PASSAGE_PATIENCE,
        barren=f"passages: no question of kind {kind} can be asked of {chunks} chunks; give more.",
    )
    metric = "string_match_all" if kind == "list" else "subspan_em"
    return Task(name=f"passages/{chunks}", metric=metric, examples=examples, max_new_tokens=64, seed=seed)


def _passage_context(
    seed: int, number: int, chunks: int, kind: QuestionKind, pool: int, per_context: int, split: Split
) -> list[Example]:
    world, texts = _pool(seed * 1_000_003 + number, pool, split)
    shown = list(texts[:chunks])
    # lists and unanswerable questions depend on all passages; the others are about the related ones alone, so that
    # they are the same at every size
    stated = world.stated(shown if kind in ("list", "unanswerable") else shown[:_CORE])
    asked = world.ask(random.Random(f"ask:{seed}:{number}:{kind}"), stated, per_context)
    random.Random(f"order:{seed}:{number}:{chunks}").shuffle(shown)
    return [
        Example(
            example_id=f"{number}-{place}",
            question=question.question,
            chunks=tuple(shown),
            answers=question.golds or (question.gold,),
            kind=kind,
            needed=tuple(at for at, text in enumerate(shown) if any(line in text for line in question.support)),
        )
        for place, question in enumerate(each for each in asked if each.kind == kind)
    ]


@lru_cache(maxsize=64)
def _pool(seed: int, pool: int, split: Split) -> tuple[World, tuple[str, ...]]:
    """A world and `pool` of its passages, with those of related entities first."""
    world = World.generate(seed, split=split, size=max(24, pool))
    rng = random.Random(f"passages:{split}:{pool}:{seed}")
    titles = _related(rng, world)
    core = [text for title in titles for text in _cut(world.document(title))][:_CORE]
    others = [text for document in world.documents for text in _cut(document) if text not in core]
    return world, tuple(core + rng.sample(others, pool - len(core)) if pool > len(core) else core[:pool])


def _related(rng: random.Random, world: World) -> list[str]:
    """Titles of related documents: each names, or is named by, a document before it."""
    known = {document.title for document in world.documents}
    links: dict[str, list[str]] = {}
    for fact in world.facts:
        if fact.value in known:
            links.setdefault(fact.subject, []).append(fact.value)
            links.setdefault(fact.value, []).append(fact.subject)
    found = [rng.choice([document.title for document in world.documents if document.title in links])]
    for title in found:  # the list grows during the iteration
        near = [other for other in dict.fromkeys(links.get(title, ())) if other not in found]
        found += rng.sample(near, min(2, len(near)))
        if len(found) >= _CORE:
            break
    return found


def _cut(document: WorldDocument) -> list[str]:
    """The document cut into passages of nearly equal length, each with its heading."""
    count = -(-len(document.sentences) // _SENTENCES)
    edges = [len(document.sentences) * at // count for at in range(count + 1)]
    return [f"# {document.title}\n\n{' '.join(document.sentences[left:right])}" for left, right in pairwise(edges)]


_LABELS = listed("brask dolin fenup garo hivel jumat kesto lorip mavun noxel pidra quern")
_PLACES = listed(
    "in the yard|by the road|near the river|behind the house|under the bridge|at the market|on the hill", "|"
)


def icl(*, seed: int = 0, limit: int = 100, chunks: int = 8, shots: int = 4, classes: int = 3) -> Task:
    """Many-shot learning: `shots` sentences per chunk with meaningless labels; the question is the label of a new one.

    The label depends on the kind of thing in the sentence. In the slice "seen" the thing is in a shot, so looking it up
    is enough. In "unseen" it is not, so the rule must be learned. With 0 `chunks` nothing is read.
    """
    require("limit", limit, 1)
    require("chunks", chunks, 0, 1024)
    require("shots", shots, 1, 1000)
    require("classes", classes, 2, len(GROUPS))
    examples = []
    for number in range(limit):
        rng = random.Random(f"icl:{seed}:{chunks}:{shots}:{number}")
        drawn = Shots(rng, count=chunks * shots, classes=classes, labels=_LABELS)
        seen = bool(drawn.shown) and number % 2 == 0
        group, thing = rng.choice(drawn.shown) if seen else drawn.fresh(rng)
        texts = drawn.chunks([neutral_sentence(rng, shown, _PLACES) for _, shown in drawn.shown], shots)
        examples.append(
            Example(
                example_id=str(number),
                question=shot_text(neutral_sentence(rng, thing, _PLACES)),
                chunks=tuple(texts),
                answers=(drawn.labels[group],),
                kind="seen" if seen else "unseen",
                needed=tuple(dict.fromkeys(at // shots for at, (_, shot) in enumerate(drawn.shown) if shot == thing)),
                classes=tuple(sorted(drawn.labels.values())),
            )
        )
    return Task(name=f"icl/{chunks}", metric="classification", examples=examples, max_new_tokens=32, seed=seed)


def variables(
    *,
    seed: int = 0,
    limit: int = 100,
    chunks: int = 8,
    words: int = 60,
    kind: Literal["value", "reference"] = "reference",
) -> Task:
    """What a variable stands for, in a list of nothing but variables; `kind` "reference": for what another one did.

    "value" asks for a line that gives its value itself, as RULER's niah_multikey_3 does. "reference" is its variable
    tracking: the line names an earlier variable, which gets another value later, and is asked for what it stood for.
    Lists of both kinds are drawn alike.
    """
    require_sizes(limit, chunks, words)
    require("words", words, 4)  # each chunk has a line
    require("chunks x words", chunks * words, 120, 570)  # both kinds are there; names suffice
    examples = []
    for number in range(limit):
        rng = random.Random(f"variables:{kind}:{seed}:{chunks}:{words}:{number}")
        drawn = variable_list(rng, chunks * words // 2 - 1)
        line = rng.choice([each for each in drawn.known if each.refers == (kind == "reference")])
        examples.append(
            Example(
                example_id=str(number),
                question=asked(line.name),
                chunks=cut(drawn.texts(), chunks),
                answers=(line.value,),
                kind=kind,
            )
        )
    return match_all("variables", examples, chunks, 2, seed)


_QUESTIONS = 4  # per context, whose KV is then made once for all of them
_RUN = 3  # consecutive passages of a text, which are the hardest distractors

_TEXT_PATIENCE = 500  # consecutive contexts without a question


def cloze(*, seed: int = 0, limit: int = 100, chunks: int = 8, words: int = 50, folder: str = "") -> Task:
    """Words left out of a sentence of plain English, from Python's language reference or the texts of a `folder`.

    A chunk has about `words` words. `folder` is searched for .txt, .md and .rst files.
    """
    require("chunks", chunks, 1, 1024)
    require("limit", limit, 1)
    require("words", words, 20, 2000)
    passages = [_passages(text, words) for text in (_files(folder) if folder else reference_texts())]
    passages = [cut for cut in passages if cut]
    if sum(map(len, passages)) < chunks or not any(english_sentences(p) for cut in passages for p in cut):
        raise UsageError(f"cloze: {folder or 'the reference'} holds too little plain English for {chunks} chunks.")
    rng = random.Random(f"cloze:{seed}:{chunks}:{words}")
    examples = gathered(
        limit,
        lambda number: _text_context(rng, _drawn(rng, passages, chunks), number),
        patience=_TEXT_PATIENCE,
        barren=f"cloze: {folder or 'the reference'} has no sentence to ask about in {chunks} chunks.",
    )
    return Task(name=f"cloze/{chunks}", metric="contains", examples=examples, max_new_tokens=96, seed=seed)


def _files(folder: str) -> list[str]:
    root = Path(folder).expanduser()
    paths = sorted(path for path in root.rglob("*") if path.suffix in (".txt", ".md", ".rst") and path.is_file())
    if not paths:
        raise UsageError(f"cloze: {folder} holds no .txt, .md or .rst file.")
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths]


def _passages(text: str, words: int) -> list[str]:
    """Passages of whole paragraphs or sentences with about `words` words; longer units are cut between words."""
    units = re.split(r"\n\s*\n|(?<=\.)\s", text)
    found: list[str] = []
    held: list[str] = []
    for unit in units:
        own = unit.split()
        if held and len(held) + len(own) > words:
            found.append(" ".join(held))
            held = []
        held += own
        while len(held) > words:
            found.append(" ".join(held[:words]))
            held = held[words:]
    return [*found, " ".join(held)] if held else found


def _drawn(rng: random.Random, passages: Sequence[Sequence[str]], chunks: int) -> list[str]:
    """Distinct passages in random order, drawn in runs of up to `_RUN` passages of one text."""
    chosen: dict[str, None] = {}
    while len(chosen) < chunks:
        cut = rng.choice(passages)
        at = rng.randrange(len(cut))
        for passage in cut[at : at + _RUN]:
            if len(chosen) < chunks:
                chosen[passage] = None
    drawn = list(chosen)
    rng.shuffle(drawn)
    return drawn


def _text_context(rng: random.Random, texts: list[str], number: int) -> list[Example]:
    """Questions about different sentences, each of which only one chunk contains."""
    found = [(index, sentence) for index, text in enumerate(texts) for sentence in english_sentences(text)]
    found = [pair for pair in found if sum(pair[1] in text for text in texts) == 1]
    rng.shuffle(found)
    asked = [(index, blank) for index, sentence in found for blank in clozes(rng, sentence)][:_QUESTIONS]
    return [
        Example(
            example_id=f"{number}-{place}",
            question=blank.question,
            chunks=tuple(texts),
            answers=(blank.gold,),
            kind="cloze",
            needed=(index,),
        )
        for place, (index, blank) in enumerate(asked)
    ]
