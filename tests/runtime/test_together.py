"""Threads and tasks that ask at the same time are answered in one batch; and they end as they should, all of them.

Overlaps are made certain, not likely: the first step of the model is held until everybody has asked.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ragkv import RagKV
from ragkv.errors import AnswerInterruptedError, PromptTooLongError, RagkvError, StoreError

FACTS = {
    "halden": "Halden Works was founded by Mira Oskel in 1907.",
    "bolt": "Bolt Ltd makes valves. Bolt Ltd was founded by Ann Lee in Varn.",
    "kesk": "Kesk Mills was founded by Tova Lind. Kesk Mills makes flour.",
}
QUESTIONS = [
    "Who founded Halden Works?",
    "What does Bolt Ltd make?",
    "Who founded Kesk Mills?",
    "Who founded Bolt Ltd?",
]
ENGINES = ["full", "block", "ape", "pced"]
WAIT = 600


@pytest.fixture(scope="module")
def place(tmp_path_factory, model_folder):
    folder = tmp_path_factory.mktemp("together")
    for name, text in FACTS.items():
        (folder / f"{name}.txt").write_text(text)
    with RagKV.create(folder / "index", model=str(model_folder), device="cpu", chunk_tokens=128) as made:
        made.ingest(*(folder / f"{name}.txt" for name in FACTS))
    return folder / "index"


@pytest.fixture
def rag(place):
    with RagKV.open(place, device="cpu") as opened:
        opened.model.eos_ids = frozenset()  # random weights: no answer ends by chance
        warm(opened)
        yield opened
    assert not [thread for thread in threading.enumerate() if thread.name == "ragkv-answer"]


def warm(rag):
    """Everything that is loaded or encoded once is there: what steps from now on answers questions."""
    for name in ENGINES:
        rag.query(QUESTIONS[0], engine=name, max_new_tokens=1)


class Gate:
    """The model's first step waits until so many requests have come; and how many rows each step had."""

    def __init__(self, monkeypatch, rag, wanted):
        self.rows, self.held, self.go_on = [], threading.Event(), threading.Event()
        runtime, step, submit, come = rag.index.runtime, rag.model.step, rag.index.runtime.submit, []

        def counted(*args, **kwargs):
            job = submit(*args, **kwargs)
            come.append(job)
            if len(come) == wanted:
                self.go_on.set()
            return job

        def waiting(rows, ids, **more):
            self.held.set()
            assert self.go_on.wait(WAIT)
            self.rows.append(len(rows))
            return step(rows, ids, **more)

        monkeypatch.setattr(runtime, "submit", counted)
        monkeypatch.setattr(rag.model, "step", waiting)
        self.jobs = come


def asks(rag, n, **options):
    return [rag.query(QUESTIONS[i % 4], engine=ENGINES[i // 4 % 4], max_new_tokens=5, **options).text for i in range(n)]


def test_threads_are_answered_in_one_batch(rag, monkeypatch):
    wanted = asks(rag, 16)
    gate = Gate(monkeypatch, rag, 16)
    with ThreadPoolExecutor(16) as pool:
        found = list(
            pool.map(lambda i: rag.query(QUESTIONS[i % 4], engine=ENGINES[i // 4], max_new_tokens=5).text, range(16))
        )
    assert found == wanted
    assert max(gate.rows) >= 15  # who drove the first step was not beside the others in it
    assert len(gate.rows) <= 2 * 5 + 1
    assert rag.index.runtime.idle


def test_sixty_four_tasks_are_answered_in_one_batch(rag, monkeypatch):
    wanted = asks(rag, 16)
    gate = Gate(monkeypatch, rag, 64)

    async def run():
        return await asyncio.gather(
            *(rag.aquery(QUESTIONS[i % 4], engine=ENGINES[i // 4 % 4], max_new_tokens=5) for i in range(64))
        )

    assert [answer.text for answer in asyncio.run(run())] == wanted * 4
    assert max(gate.rows) >= 63
    assert len(gate.rows) <= 2 * 5 + 1
    assert rag.index.runtime.idle


def test_one_of_each_kind_of_trouble_beside_others(rag, monkeypatch):
    """One stops, one is slow, one raises, one is too long, one has lost its record: the others hear nothing of it."""
    wanted = asks(rag, 4)
    gate = Gate(monkeypatch, rag, 8)
    slow = threading.Event()

    def fine(i):
        return rag.query(QUESTIONS[i], engine=ENGINES[0], max_new_tokens=5).text

    def stops():
        with rag.stream(QUESTIONS[0], engine="ape", max_new_tokens=300) as stream:
            next(iter(stream))
        return stream.answer.finish_reason

    def lags():
        pieces = iter(rag.stream(QUESTIONS[1], engine="block", max_new_tokens=5))
        first = next(pieces)
        assert slow.wait(WAIT)
        return first + "".join(pieces)

    def raises():
        def criterion(ids, scores):
            raise ArithmeticError("the criterion's own")

        with pytest.raises(ArithmeticError, match="the criterion's own"):
            rag.query(QUESTIONS[2], engine="pced", max_new_tokens=5, stopping_criteria=[criterion])

    def too_long():
        with pytest.raises(PromptTooLongError, match="512"):
            rag.query("Why? " * 200, engine="full", max_new_tokens=5, chunks=rag.retrieve(QUESTIONS[0]))

    with ThreadPoolExecutor(8) as pool:
        lagging = pool.submit(lags)
        good = [pool.submit(fine, i) for i in range(4)]
        others = [pool.submit(each) for each in (stops, raises, too_long)]
        assert [each.result() for each in good] == wanted
        assert others[0].result() == "cancelled"
        for each in others:
            each.result()
        slow.set()
        assert lagging.result().strip() == rag.query(QUESTIONS[1], engine="block", max_new_tokens=5).text
    assert len(gate.jobs) == 9
    assert rag.index.runtime.idle


def test_a_lost_record_is_made_again_once_for_all_who_wait(rag, place, monkeypatch):
    """The store is asked once for a chunk, and it is encoded once, however many wait for it."""
    question, options = QUESTIONS[1], {"engine": "block", "max_new_tokens": 4, "top_k": 1}
    wanted = rag.query(question, **options)
    rag.store.memory("cpu", budget=0)
    lost = rag.recall.identity(*_stored(rag, wanted))
    asked, encoded = [], []
    get_many, encode = rag.store.get_many, rag.model.encode
    everybody = threading.Barrier(6, timeout=WAIT)

    def watched(identities, **more):
        found = get_many(identities, **more)
        asked.extend(identities)
        return {identity: kv for identity, kv in found.items() if identity != lost}

    monkeypatch.setattr(rag.store, "get_many", watched)
    monkeypatch.setattr(rag.model, "encode", lambda ids, **more: (encoded.extend(ids), encode(ids, **more))[1])
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda _: (everybody.wait(), rag.query(question, **options))[1], range(6)))
    assert {answer.text for answer in found} == {wanted.text}
    assert asked.count(lost) == 1
    assert encoded.count(lost.chunk_ids) == 1
    assert sum(answer.kv.misses for answer in found) == 1


def _stored(rag, answer):
    from ragkv.types import Encoding

    chunk = next(c for c in rag.store.chunks() if c.chunk_id == answer.sources[0].chunk_id)
    return Encoding.STANDALONE, chunk.token_ids


def test_closing_ends_all_who_wait(place, monkeypatch):
    """Threads and tasks, in a step and before it; the store is closed when nobody reads."""
    rag = RagKV.open(place, device="cpu")
    rag.model.eos_ids = frozenset()
    warm(rag)
    gate = Gate(monkeypatch, rag, 99)
    inside = threading.Event()
    step = rag.model.step

    def watched(*args, **kwargs):
        inside.set()
        found = step(*args, **kwargs)
        assert not closed.is_set()
        inside.clear()
        return found

    closed, close = threading.Event(), rag.store.close
    monkeypatch.setattr(rag.model, "step", watched)
    monkeypatch.setattr(rag.store, "close", lambda: (closed.set(), close()))

    def ask(i):
        with pytest.raises(AnswerInterruptedError, match="was closed before the answer"):
            rag.query(QUESTIONS[i % 4], engine=ENGINES[i % 4], max_new_tokens=400)
        return True

    async def tasks():
        return await asyncio.gather(
            *(rag.aquery(q, engine="block", max_new_tokens=400) for q in QUESTIONS), return_exceptions=True
        )

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, i) for i in range(6)]
        background = pool.submit(asyncio.run, tasks())
        gate.held.wait()
        while len(gate.jobs) < 10:
            threading.Event().wait(0.001)
        closing = pool.submit(rag.close)
        while rag.index not in rag.index.runtime._closed:
            threading.Event().wait(0.001)
        assert not closed.is_set()  # a step still reads
        gate.go_on.set()
        closing.result()
        assert all(each.result() for each in asked)
        assert [type(each) for each in background.result()] == [AnswerInterruptedError] * 4
    assert closed.is_set()
    assert not inside.is_set()
    assert rag.index.runtime.idle
    assert not [thread for thread in threading.enumerate() if thread.name == "ragkv-answer"]
    with pytest.raises(StoreError, match="open it again"):
        rag.query(QUESTIONS[0])
    rag.close()  # twice is once


def test_closing_while_one_is_still_looking_for_its_chunks(place, monkeypatch):
    """It has not come to the runtime yet; it ends all the same, and with the same sentence."""
    rag = RagKV.open(place, device="cpu")
    rag.query(QUESTIONS[0], max_new_tokens=1)
    looking, go_on = threading.Event(), threading.Event()
    chunks = rag.recall.chunks

    def held(*args, **kwargs):
        looking.set()
        assert go_on.wait(WAIT)
        return chunks(*args, **kwargs)

    monkeypatch.setattr(rag.recall, "chunks", held)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(rag.query, QUESTIONS[0], engine="block")
        assert looking.wait(WAIT)
        rag.close()
        go_on.set()
        with pytest.raises(AnswerInterruptedError, match="was closed before the answer"):
            asked.result()
    assert rag.index.runtime.idle


def test_tasks_that_leave_take_nothing_with_them(rag, monkeypatch):
    """Cancelled, left early, dropped without a word, raised in: rows, KV and threads are free at once."""

    async def run():
        task = asyncio.create_task(rag.aquery(QUESTIONS[0], engine="full", max_new_tokens=400))
        stream = rag.astream(QUESTIONS[1], engine="ape", max_new_tokens=400)
        assert await anext(aiter(stream))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async for _ in rag.astream(QUESTIONS[2], engine="block", max_new_tokens=400):
            break
        await stream.aclose()
        never = rag.astream(QUESTIONS[3])
        del never
        return (await rag.aquery(QUESTIONS[0], max_new_tokens=3)).text

    assert asyncio.run(run()) == rag.query(QUESTIONS[0], max_new_tokens=3).text
    gc.collect()
    assert rag.index.runtime.idle


def test_a_loop_that_is_closed_over_a_stream(rag):
    """Nobody can be told of the pieces any more: the thread notices, and ends."""
    loop = asyncio.new_event_loop()
    stream = rag.astream(QUESTIONS[0], engine="full", max_new_tokens=400)
    pieces = aiter(stream)
    loop.run_until_complete(anext(pieces))
    loop.close()
    [thread] = [thread for thread in threading.enumerate() if thread.name == "ragkv-answer"]
    thread.join(WAIT)
    assert not thread.is_alive()
    assert rag.index.runtime.idle


def test_a_dropped_stream_gives_everything_back(rag):
    stream = rag.stream(QUESTIONS[0], engine="block", max_new_tokens=400)
    assert next(iter(stream))
    assert rag.index.runtime.pool.leased
    del stream
    gc.collect()
    assert rag.index.runtime.idle


def test_little_memory_is_shared_in_turn(rag, monkeypatch):
    """KV of one question at a time: nobody goes beyond it, nobody starves, one thread may hold two streams."""
    wanted = asks(rag, 16)
    runtime = rag.index.runtime
    most, lease = [], runtime.pool.lease
    monkeypatch.setattr(runtime.pool, "budget", 1)
    monkeypatch.setattr(runtime.pool, "lease", lambda sizes: (lease(sizes), most.append(runtime.pool.leases))[0])
    with ThreadPoolExecutor(16) as pool:
        found = list(
            pool.map(lambda i: rag.query(QUESTIONS[i % 4], engine=ENGINES[i // 4], max_new_tokens=5).text, range(16))
        )
    assert found == wanted
    assert most
    streams = [rag.stream(question, engine="block", max_new_tokens=90) for question in QUESTIONS[:3]]
    texts = ["", "", ""]
    for turn in range(270):
        texts[turn % 3] += next(iter(streams[turn % 3]), "")
    alone = [rag.query(question, engine="block", max_new_tokens=90).text for question in QUESTIONS[:3]]
    assert [text.strip() for text in texts] == alone
    assert runtime.idle


def test_cancelled_while_it_waits_for_memory(rag, monkeypatch):
    runtime = rag.index.runtime
    monkeypatch.setattr(runtime.pool, "budget", 1)
    held = runtime.lease({"everything": 1})  # somebody loads, and takes his time
    waits = threading.Event()
    sleep = runtime._sleep
    monkeypatch.setattr(runtime, "_sleep", lambda: (waits.set(), sleep())[1])
    stream = rag.stream(QUESTIONS[0], engine="block", max_new_tokens=4)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(list, stream)
        assert waits.wait(WAIT)
        stream.cancel()
        assert asked.result() == []
    assert stream.answer.finish_reason == "cancelled"
    runtime.release(held)
    assert runtime.idle


def _python(code, *arguments):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=False,
    )


def test_a_program_that_ends_without_closing(place):
    """Streams half read, a thread in the middle of an answer, tasks: the interpreter ends, quietly."""
    done = _python(
        """
        import asyncio, sys, threading
        from ragkv import RagKV
        rag = RagKV.open(sys.argv[1], device="cpu")
        rag.model.eos_ids = frozenset()
        stream = rag.stream("Who founded Bolt Ltd?", engine="block", max_new_tokens=300)
        print(bool(next(iter(stream))))
        begun = threading.Event()
        def ask():
            for piece in rag.stream("Who founded Halden Works?", engine="pced", max_new_tokens=40):
                begun.set()
        threading.Thread(target=ask).start()
        begun.wait()
        async def leave():
            pieces = rag.astream("What does Bolt Ltd make?", engine="ape", max_new_tokens=40)
            return await anext(aiter(pieces))
        print(bool(asyncio.run(leave())))
        """,
        place,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\nTrue\n", "")


def test_after_a_fork(place):
    """What the parent's threads were in the middle of is not the child's: its runtime begins anew, and works."""
    done = _python(
        """
        import os, pickle, sys, threading, warnings
        import torch
        torch.set_num_threads(1)
        from ragkv import RagKV
        from ragkv.errors import AnswerInterruptedError
        rag = RagKV.open(sys.argv[1], device="cpu")
        rag.model.eos_ids = frozenset()
        question = "Who founded Bolt Ltd?"
        wanted = rag.query(question, engine="full", max_new_tokens=4).text
        mine = rag.stream(question, engine="block", max_new_tokens=100)
        next(iter(mine))
        inside, go_on, step = threading.Event(), threading.Event(), rag.model.step
        def held(*args, **more):
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                go_on.wait()
            return step(*args, **more)
        rag.model.step = held
        other = threading.Thread(target=rag.query, args=(question,), kwargs={"engine": "full", "max_new_tokens": 2})
        other.start()
        inside.wait()
        child = os.fork()
        if not child:
            code = 1
            try:
                assert rag.index.runtime.idle
                try:
                    list(mine)
                except AnswerInterruptedError as error:
                    assert "fork" in str(error)
                else:
                    raise AssertionError
                with RagKV.open(sys.argv[1], device="cpu") as again:
                    again.model.eos_ids = frozenset()
                    assert again.query(question, engine="full", max_new_tokens=4).text == wanted
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        go_on.set()
        other.join()
        assert mine.answer if not list(mine) else True
        with pickle.loads(pickle.dumps(rag)) as copy:
            copy.model.eos_ids = frozenset()
            assert copy.query(question, engine="full", max_new_tokens=4).text == wanted
        rag.close()
        print("well")
        """,
        place,
    )
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr


def test_errors_of_the_runtime_are_sentences():
    assert issubclass(AnswerInterruptedError, RagkvError)
