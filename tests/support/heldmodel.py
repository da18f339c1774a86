"""A model that holds an answer at some point until the answer is cancelled.

So it does not matter whether the cancelling or the computing thread is faster.
"""

import threading

from ragkv.index.answer import AnswerStream


def call_at_third_piece(then, put=setattr):
    """Call `then` with every answer when it has its third text; `put` may be monkeypatch's setattr."""
    whole = AnswerStream._run

    def run(self):
        for count, piece in enumerate(whole(self)):
            if count == 2:
                then(self)
            yield piece

    put(AnswerStream, "_run", run)


class HeldModel:
    """`steps` counts the model's steps; from `last` on, each waits for a cancel. `begun` is set at that step."""

    def __init__(self, rag, monkeypatch, *, last):
        self.steps = 0
        self.begun = threading.Event()
        self.cancelled = threading.Event()
        step, cancel = rag.model.step, AnswerStream.cancel

        def held(*arguments, **more):
            self.steps += 1
            if self.steps >= last:
                self.begun.set()
                assert self.cancelled.wait(600), "nobody cancelled the answer"
            return step(*arguments, **more)

        def noted(stream):
            cancel(stream)
            self.cancelled.set()

        monkeypatch.setattr(rag.model, "step", held)
        monkeypatch.setattr(AnswerStream, "cancel", noted)
