"""Worlds cut into passages, as chunking does it, and lines for `ragkv finetune block --data` about them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ragkv.benchmarks.evaluation.worlds.world import Split, World, WorldDocument, WorldQuestion
from ragkv.config import one_of
from ragkv.errors import ConfigError, UsageError
from ragkv.mini import lm_path
from ragkv.util.files import refusal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_LINES = 4
"""Lines per world, because making a world takes most of the time. Its passages are cut differently for each line."""
_TWO_HOPS = 0.4
"""Share of lines with a question of two hops, if the passages have one."""


def write_world_examples(
    path: Path, *, samples: int = 200, passage_range: tuple[int, int] = (4, 8), split: str = "train", seed: int = 0
) -> dict[str, Any]:
    """Write `samples` lines `{"prompt", "blocks", "response"}`, a few from each world, and return a summary.

    The same arguments give the same file. The `split` "heldout" shares no name with "train". The passage with the
    answer has a random place among `passage_range` passages, whose length is counted in tokens of the bundled model.
    """
    from transformers import AutoTokenizer

    one_of("split", split, ("train", "heldout"))
    fewest, most = passage_range
    if samples < 1 or not 1 <= fewest <= most:
        raise ConfigError("Give at least one sample, and a fewest number of passages from 1 up to the most.")
    tokenizer = AutoTokenizer.from_pretrained(lm_path(), local_files_only=True, trust_remote_code=False)
    lines: list[str] = []
    two_hops = number = 0
    while len(lines) < samples:
        rng = random.Random(f"{seed}:{number}")
        number += 1
        world = World.generate(rng.getrandbits(40), split=cast(Split, split), size=max(8, most) + rng.randint(0, 10))
        for _ in range(min(_LINES, samples - len(lines))):
            texts = passages(rng, tokenizer, world)[: rng.randint(fewest, most)]
            known = answerable(world, texts)
            if not known:
                continue  # a single passage may answer no question
            far = [question for question in known if question.hops == 2]
            question = rng.choice(far if far and rng.random() < _TWO_HOPS else known)
            two_hops += question.hops == 2
            lines.append(json.dumps({"prompt": question.question, "blocks": texts, "response": question.answer}))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({refusal(error)}).") from error
    return {"output": str(path), "lines": len(lines), "two_hops": two_hops, "split": split, "seed": seed}


def _file_units(rng: random.Random, world: World) -> list[tuple[str, ...]]:
    """Group the documents into files of one to four sections. A file is a tuple of headings and sentences."""
    documents = list(world.documents)
    rng.shuffle(documents)
    files: list[tuple[str, ...]] = []
    while documents:
        count = rng.choice((1, 1, 2, 3, 4))
        sections, documents = documents[:count], documents[count:]
        markdown = rng.random() < 0.8
        units: list[str] = []
        for index, document in enumerate(sections):
            units += _section_units(rng, document, ("# " if index == 0 else "## ") if markdown else "")
        files.append(tuple(units))
    return files


def _section_units(rng: random.Random, document: WorldDocument, mark: str) -> list[str]:
    """One section: its heading (one in eight has none) and its sentences, with or without paragraphs."""
    units = [] if rng.random() < 0.125 else [f"{mark}{document.title}{rng.choice((chr(10), chr(10) * 2))}"]
    paragraphs = rng.random() < 0.3
    for index, sentence in enumerate(document.sentences):
        last = index == len(document.sentences) - 1
        units.append(sentence + ("\n\n" if last or (paragraphs and rng.random() < 0.35) else " "))
    return units


def passages(rng: random.Random, tokenizer: PreTrainedTokenizerFast, world: World, *, limit: int = 96) -> list[str]:
    """Cut the world into passages of about 30 to `limit` tokens, in random order and stripped.

    Most cuts are between sentences. One passage in ten loses a few words at either end, and one in twenty has broken
    lines, like text from a PDF.
    """
    files = _file_units(rng, world)
    flat = [unit for file in files for unit in file]
    sizes = iter([len(ids) for ids in tokenizer(flat, add_special_tokens=False)["input_ids"]])
    texts: list[str] = []
    for file in files:
        target = rng.randint(30, limit)
        text, size = "", 0
        for unit in file:
            tokens = next(sizes)
            if size and size + tokens > target:
                texts.append(text)
                text, size = "", 0
                target = rng.randint(30, limit) if rng.random() < 0.5 else limit
            text += unit
            size += tokens
        if size >= 8:
            texts.append(text)
    rng.shuffle(texts)
    return [_damaged(rng, text).strip() for text in texts]


def _damaged(rng: random.Random, text: str) -> str:
    """Sometimes damage a passage as real extraction and chunking do."""
    kind = rng.random()
    words = text.split(" ")
    if kind < 0.1 and len(words) > 20:
        return " ".join(words[rng.randint(0, 5) : len(words) - rng.randint(0, 5)])
    if kind < 0.15:
        return "".join(word + ("\n" if rng.random() < 0.1 else " ") for word in words)
    return text


def answerable(world: World, texts: Sequence[str]) -> list[WorldQuestion]:
    """The world's questions of one or two hops whose supporting sentences are all in `texts`."""
    sentences = {fact.sentence for fact in world.stated(texts)}
    return [question for question in world.questions if sentences.issuperset(question.support)]
