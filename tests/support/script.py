"""Engines with made-up scores, which need no model."""

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch

from ragkv.engines import Argmax, Engine, Forward, ModelFacts, Program, Release, Request, Sample, engine_class
from ragkv.engines.full import FullConfig

__all__ = ["NOTHING", "Script", "by_hand", "written"]

NOTHING = Request(prefix_ids=(), chunks=(), suffix_ids=())
"""A request with nothing to read."""


class Script(Engine):
    """Proposes the given ids, whatever was chosen; `asked` counts the calls."""

    name, encoding, Config = "script", None, FullConfig

    def __init__(self, ids: Sequence[int]) -> None:
        super().__init__()
        self.ids, self.asked = list(ids), 0

    def program(self, request: Request, model: ModelFacts) -> Program:
        for token_id in self.ids:
            self.asked += 1
            scores = torch.zeros(1000)
            scores[token_id] = 1.0
            yield Sample(scores)


def written(monkeypatch: Any, engines: Sequence[str], texts: Mapping[str, Sequence[str]]) -> list[tuple[str, int]]:
    """Make engines write the next of these texts to a prompt that contains the text before it; the model answers
    everything else. Returns a growing list of these prompts and the numbers of chunks that were read.
    """
    asked: list[tuple[str, int]] = []
    left = {words: list(each) for words, each in texts.items()}
    for name in engines:
        kind = engine_class(name)

        def program(self: Any, request: Request, model: Any, own: Any = kind.program) -> Program:
            words = next((words for words in left if words in request.question), None)
            if words is None:
                yield from own(self, request, model)
                return
            asked.append((request.question, len(request.chunks)))
            for token_id in (*model.tokens.encode(left[words].pop(0) + "\n"), 0):
                scores = torch.zeros(model.config.vocab_size)
                scores[token_id] = 1.0
                yield Sample(scores)

        monkeypatch.setattr(kind, "program", program)
    return asked


def by_hand(
    program: Generator[Any, Any, Any], read: Any, *, choose: Any = None, leave: Any = None, steps: int = -1
) -> Any:
    """Run a program with `read(Read) -> logits (rows, vocab)` and `choose(Choose) -> id`, by default the best one.

    `leave(Leave)` is called for released rows. Ends after `steps` tokens, or with the program's return value.
    """
    answer: Any = None
    try:
        while steps:
            ask = program.send(answer)
            if isinstance(ask, Forward):
                answer = read(ask)
            elif isinstance(ask, Argmax):
                answer = ask.logits.argmax(-1).tolist()
            elif isinstance(ask, Sample):
                steps -= 1
                answer = int(ask.best()) if choose is None else choose(ask)
            else:
                assert isinstance(ask, Release)
                answer = None
                if leave is not None:
                    leave(ask)
        program.close()
    except StopIteration as end:
        return end.value
    return None
