"""RagKV from an event loop and from several threads: the answers of one thread, a loop that is free, clean ends."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from heldmodel import HeldModel

from ragkv import RagKV
from ragkv.errors import RetrievalError, UsageError

FACTS = {
    "halden": "Halden Works was founded by Mira Oskel in 1907.",
    "bolt": "Bolt Ltd makes valves. Bolt Ltd was founded by Ann Lee in Varn.",
    "kesk": "Kesk Mills was founded by Tova Lind. Kesk Mills makes flour.",
}
QUESTIONS = [
    ("Who founded Halden Works?", "full"),
    ("What does Bolt Ltd make?", "block"),
    ("Who founded Kesk Mills?", "ape"),
    ("What does Kesk Mills make?", "pced"),
    ("Where was Bolt Ltd founded?", "ape"),
    ("Who founded Bolt Ltd?", "pced"),
    ("When was Halden Works founded?", "block"),
    ("What was founded in 1907?", "full"),
]


@pytest.fixture(scope="module")
def rag(tmp_path_factory, model_folder):
    folder = tmp_path_factory.mktemp("background")
    for name, text in FACTS.items():
        (folder / f"{name}.txt").write_text(text)
    with RagKV.create(folder / "index", model=str(model_folder), device="cpu", chunk_tokens=128) as made:
        made.ingest(*(folder / f"{name}.txt" for name in FACTS))
        made.model.eos_ids = frozenset()  # random weights: no answer ends by chance
        yield made


def test_eight_threads_get_the_answers_of_one(rag):
    def ask(asked):
        question, engine = asked
        return rag.query(question, engine=engine, max_new_tokens=8)

    alone = [ask(asked) for asked in QUESTIONS]
    together = threading.Barrier(8, timeout=600)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda asked: (together.wait(), ask(asked))[1], QUESTIONS))
    assert [a.text for a in found] == [a.text for a in alone]
    assert [[s.chunk_id for s in a.sources] for a in found] == [[s.chunk_id for s in a.sources] for a in alone]
    assert len({a.text for a in alone}) > 4


def test_tasks_get_the_answers_of_one(rag):
    async def run():
        return await asyncio.gather(*(rag.aquery(q, engine=e, max_new_tokens=6) for q, e in QUESTIONS[:4]))

    found = asyncio.run(run())
    assert [a.text for a in found] == [rag.query(q, engine=e, max_new_tokens=6).text for q, e in QUESTIONS[:4]]


def test_pieces_come_while_the_loop_goes_on(rag, monkeypatch):
    """The third token waits for the loop, which would never come if it were blocked."""
    wanted = list(rag.stream(QUESTIONS[0][0], engine="full", max_new_tokens=6))
    honest, steps, go_on = rag.model.step, [], threading.Event()

    def held(*args, **kwargs):
        steps.append(threading.current_thread())
        if len(steps) == 3:
            assert go_on.wait(600)
        return honest(*args, **kwargs)

    monkeypatch.setattr(rag.model, "step", held)

    async def run():
        stream = rag.astream(QUESTIONS[0][0], engine="full", max_new_tokens=6)
        with pytest.raises(ValueError, match="not begun"):
            _ = stream.answer
        asyncio.get_running_loop().call_later(0.01, go_on.set)
        return [piece async for piece in stream], stream.answer

    pieces, answer = asyncio.run(run())
    assert pieces == wanted
    assert (answer.text, answer.finish_reason) == ("".join(wanted).strip(), "length")
    assert threading.current_thread() not in steps


def test_a_cancelled_task_ends_its_answer_before_it_ends_itself(rag, monkeypatch):
    model = HeldModel(rag, monkeypatch, last=4)

    async def run():
        task = asyncio.create_task(rag.aquery(QUESTIONS[0][0], engine="full", max_new_tokens=400))
        assert await asyncio.to_thread(model.begun.wait, 600)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        then = model.steps
        await asyncio.sleep(0.05)
        return then

    assert asyncio.run(run()) == model.steps == 4  # no token was computed after the task's end


def test_leaving_early(rag, monkeypatch):
    HeldModel(rag, monkeypatch, last=40)

    async def run():
        async with rag.astream(QUESTIONS[0][0], engine="ape", max_new_tokens=400) as stream:
            return await anext(aiter(stream)), stream

    piece, stream = asyncio.run(run())
    assert stream.answer.finish_reason == "cancelled"
    assert stream.answer.text.startswith(piece.strip())

    async def never():
        stream = rag.astream(QUESTIONS[0][0])
        stream.cancel()
        return [piece async for piece in stream], stream.answer.finish_reason

    assert asyncio.run(never()) == ([], "cancelled")


def test_errors_reach_the_task(rag):
    async def run():
        with pytest.raises(UsageError, match="Unknown engine"):
            await rag.aquery("Who?", engine="turbo")
        with pytest.raises(RetrievalError, match="No chunk"):
            await rag.aquery("zzzqqq")
        return await rag.aretrieve(QUESTIONS[0][0], top_k=2)

    assert asyncio.run(run()) == rag.retrieve(QUESTIONS[0][0], top_k=2)


def test_many_questions_read_shared_chunks_once(rag):
    rag.store.memory("cpu", budget=0)  # forget what other tests have read
    questions = [question for question, _ in QUESTIONS[:3]]
    found = rag.query_many(questions, engine="block", top_k=3, max_new_tokens=4)
    assert [a.question for a in found] == questions
    assert [a.text for a in found] == [rag.query(q, engine="block", top_k=3, max_new_tokens=4).text for q in questions]
    read = [a.kv.hits - a.kv.memory_hits for a in found]
    assert sum(read) == len({s.chunk_id for a in found for s in a.sources})
    assert rag.query_many([]) == []


def test_chunks_of_ones_own(rag):
    question = QUESTIONS[0][0]
    scored = rag.retrieve(question)
    assert rag.query(question, chunks=scored, max_new_tokens=8).text == rag.query(question, max_new_tokens=8).text
    other = rag.retrieve(QUESTIONS[2][0], top_k=1)
    answer = rag.query(question, chunks=other, engine="block", max_new_tokens=2)
    assert [s.chunk_id for s in answer.sources] == [other[0].chunk.chunk_id]
    again = rag.chunk(FACTS["halden"], chunk_id="mine")
    assert again.token_ids == next(c.token_ids for c in rag.store.chunks() if c.text == FACTS["halden"])
    with pytest.raises(RetrievalError, match="No chunk"):
        rag.query(question, chunks=[])
