"""Embedding and reranking requests: batched in a separate thread, and cancelled when their client or the server goes
away.
"""

import asyncio
import threading
from concurrent.futures import Executor

import httpx
import numpy as np
import pytest
from guarded import guarded, posted

from ragkv.retrievers import Embedding
from ragkv.server.embeddings import BATCH_TEXTS, MAX_TEXTS

WAIT = 600


class Held:
    """An embedder and reranker that records its input and waits for `go_on`."""

    modes = frozenset({"dense"})

    def __init__(self):
        self.batches, self.begun, self.go_on = [], threading.Event(), threading.Event()

    def embed_documents(self, texts):
        self.batches.append(list(texts))
        self.begun.set()
        assert self.go_on.wait(WAIT)
        return Embedding(dense=np.array([[len(text), sum(map(ord, text))] for text in texts], dtype=np.float32))

    def embed_query(self, text):
        return Embedding(dense=-self.embed_documents([text]).dense)

    def score(self, question, texts):
        return (self.embed_documents(texts).dense[:, 0] / 10).tolist()


@pytest.fixture
def held(rag, monkeypatch):
    model = Held()
    monkeypatch.setattr(type(rag.index.encoders), "embedder", model)
    monkeypatch.setattr(type(rag.index.encoders), "reranker", model)
    yield model
    model.go_on.set()


@pytest.fixture
def free(held):
    held.go_on.set()
    return held


@pytest.mark.parametrize("kind", ["query", "document"])
def test_vectors_are_in_the_order_of_their_texts(call, free, kind):
    texts = [chr(97 + i % 26) * (1 + i * 37 % 101) for i in range(100)]
    result = call("POST", "/v1/embeddings", json={"model": "two", "input": texts, "input_type": kind}).json()
    sign = -1 if kind == "query" else 1
    assert [each["embedding"] for each in result["data"]] == [[sign * len(t), sign * sum(map(ord, t))] for t in texts]
    assert [each["index"] for each in result["data"]] == list(range(100))
    assert len(free.batches) > 1
    assert max(map(len, free.batches)) <= BATCH_TEXTS
    whole = call("POST", "/v1/embeddings", json={"model": "two", "input": texts[:1]}).json()["usage"]
    assert 0 < whole["prompt_tokens"] < result["usage"]["prompt_tokens"] == result["usage"]["total_tokens"]


def test_rerankings_are_of_all_batches(call, free):
    documents = ["a" * (1 + i * 7 % 45) for i in range(45)]
    ranked = call("POST", "/v1/rerank", json={"model": "two", "query": "q", "documents": documents}).json()["results"]
    assert len(free.batches) > 1
    lengths = [len(documents[each["index"]]) for each in ranked]
    assert sorted(each["index"] for each in ranked) == list(range(45))
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize(("count", "status"), [(0, 400), (1, 200), (MAX_TEXTS, 200), (MAX_TEXTS + 1, 400)])
def test_so_many_texts_are_taken(call, free, count, status):
    assert call("POST", "/v1/embeddings", json={"model": "two", "input": ["a"] * count}).status_code == status


def running(limiter):
    return b'ragkv:num_requests_running{model_name="vectors"} 1.0' in limiter.text()


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank"])
@pytest.mark.parametrize("leaves", ["client", "server"])
def test_whoever_leaves_ends_what_is_left(app, limiter, held, path, leaves):
    body = {"model": "two", "input" if "emb" in path else "documents": ["a"] * 3 * BATCH_TEXTS}
    body |= {} if "emb" in path else {"query": "q"}

    async def run():
        gone = asyncio.Event()
        *call, answer = posted(path, body, gone)
        task = asyncio.ensure_future(guarded(app, responded=limiter.responded)(*call))
        await asyncio.to_thread(held.begun.wait, WAIT)
        while not running(limiter):
            await asyncio.sleep(0)
        gone.set() if leaves == "client" else limiter.stop()
        await task  # before the end of the batch
        assert not held.go_on.is_set()
        return answer[0]["status"]

    status = 499 if leaves == "client" else 503
    assert asyncio.run(run()) == status
    held.go_on.set()
    limiter.close()
    assert len(held.batches) == 1
    assert limiter.inside == 0
    result = limiter.text().decode()
    assert f'ragkv:http_requests_total{{handler="{path}",method="POST",status="{status}"}} 1.0' in result
    aborted = 'ragkv:request_success_total{finished_reason="abort",model_name="vectors"} 1.0'
    assert (aborted in result) == (leaves == "client")
    for gauge in ("running", "waiting"):
        assert f'ragkv:num_requests_{gauge}{{model_name="vectors"}} 0.0' in result


class Refusing(Executor):
    def submit(self, *_, **__):
        raise AssertionError("a question used the executor that uploads and listings may fill")


def test_questions_are_answered_beside_embeddings_and_a_full_executor(app, limiter, held):
    texts = {"model": "two", "input": ["a"] * BATCH_TEXTS}
    question = {"model": "two", "messages": [{"role": "user", "content": "Who founded Halden Works?"}], "max_tokens": 3}

    async def run():
        transport = httpx.ASGITransport(app=guarded(app))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=WAIT) as client:
            beside = [asyncio.ensure_future(client.post("/v1/embeddings", json=texts)) for _ in range(6)]
            await asyncio.to_thread(held.begun.wait, WAIT)
            asyncio.get_running_loop()._default_executor = Refusing()
            chat = await client.post("/v1/chat/completions", json=question)
            body = {"question": "Who founded Halden Works?", "max_new_tokens": 3}
            own = await client.post("/api/indexes/two/query", json=body)
            assert not held.go_on.is_set()
            held.go_on.set()
            return [chat.status_code, own.status_code, *[(await each).status_code for each in beside]]

    assert asyncio.run(run()) == [200] * 8
