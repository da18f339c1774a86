"""Whole texts over ranks: the answers of one process, with the blocks of a long one encoded side by side."""

from __future__ import annotations

from rankthreads import on_ranks

from ragkv.config import IndexConfig
from ragkv.distributed.rankcontexts import ContextPart
from ragkv.index.answer import AnswerStream
from ragkv.index.contexts import Contexts
from ragkv.index.task import settle_task
from ragkv.runtime import Runtime

QUESTION = "Who founded it?"
ASKED = {"max_new_tokens": 4}


def test_a_long_text_is_answered_from_by_all_ranks(make_model):
    model = make_model("llama")
    config = IndexConfig(tuning={"apb": {"block": 40, "anchor": 8, "passing": 6}})
    texts = [("book", "Halden Works was founded by Mira Oskel. " * 4), ("note", "It rained.")]
    with Contexts(model, texts, config) as whole:
        wanted = {}
        for engine in ("apb", "pced", "full"):
            stream = whole.stream(QUESTION, engine=engine, **ASKED)
            list(stream)
            wanted[engine] = stream.answer

    def work(group):
        part = ContextPart(model, texts, config)
        ground = part.ground(group, Runtime(model, ranks=group))
        answers = {}
        for engine in wanted:
            stream = AnswerStream(ground, settle_task(config, QUESTION, engine=engine, **ASKED))
            list(stream)
            answers[engine] = stream.answer
        return answers, ground._executor.passed

    for answers, passed in on_ranks(3, work):
        assert {engine: answer.text for engine, answer in answers.items()} == {
            engine: answer.text for engine, answer in wanted.items()
        }
        assert passed > 0
