"""Write a file of training examples from generated worlds: questions, passages with the answer, and answers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, cast

from ragkv.config import one_of
from ragkv.errors import ConfigError, UsageError
from ragkv.finetune.passage import answerable, passages
from ragkv.mini import lm_path
from ragkv.worlds import Split, World

__all__ = ["write_world_examples"]

_LINES = 4
"""Lines per world, because making a world takes most of the time. Its passages are cut anew for each line."""
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
        raise UsageError(f"{path} cannot be written ({error}).") from error
    return {"output": str(path), "lines": len(lines), "two_hops": two_hops, "split": split, "seed": seed}
