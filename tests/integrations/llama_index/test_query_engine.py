"""The query engine by itself: answers as the command's, sources, metadata, events, streams, and an event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest
from heldmodel import HeldModel
from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from ragkv.errors import UsageError
from ragkv.integrations.llama_index import RagKVQueryEngine, RagKVRetriever

SEQUENCE = [
    "QueryStartEvent",
    "RetrievalStartEvent",
    "RetrievalEndEvent",
    "SynthesizeStartEvent",
    "SynthesizeEndEvent",
    "QueryEndEvent",
]


@pytest.mark.parametrize("engine", ["full", "block", "ape", "pced", "single"])
def test_an_answer_is_the_commands(rag, command, told, questions, engine):
    wanted = command(questions[2], "--engine", engine, "--top-k", "4", "--max-new-tokens", "24")
    response = RagKVQueryEngine(rag, engine=engine, top_k=4, max_new_tokens=24).query(questions[2])
    assert str(response) == wanted["answer"]
    assert told.names() == SEQUENCE
    assert told.events[4].response is response
    scores = ("retrieval_score", "rerank_score", "tokens_won")
    found = [
        (n.metadata["document"], n.node_id, n.text, n.metadata.get("page"), n.score, *map(n.metadata.get, scores))
        for n in response.source_nodes
    ]
    keys = ["document", "chunk_id", "text", "page", "score", "retrieval_score", "rerank_score", "tokens_won"]
    assert found == [tuple(source[key] for key in keys) for source in wanted["sources"]]
    metadata = response.metadata
    assert {k: metadata[k] for k in ("engine", "finish_reason")} == {k: wanted[k] for k in ("engine", "finish_reason")}
    assert (metadata["kv"]["hits"], metadata["kv"]["misses"]) == (wanted["kv"]["hits"], wanted["kv"]["misses"])
    timing = metadata["timing_ms"]
    assert timing["total"] >= timing["retrieve"] + timing["load"] + timing["first_token"] > 0


def test_a_source_node_says_where_it_stands(rag, questions):
    for node in RagKVQueryEngine(rag).query(questions[0]).source_nodes:
        text = rag.store.text(node.node.ref_doc_id)
        assert (
            text[node.node.start_char_idx : node.node.end_char_idx] == node.text == rag.store.chunk(node.node_id).text
        )
        assert node.score == node.metadata["fused_score"]
        assert "fused_score" not in node.node.get_content(metadata_mode="llm")
    nodes = RagKVRetriever(rag, top_k=40).retrieve("Which product has a body of titanium?")
    assert {node.metadata["page"] for node in nodes if node.metadata["document"].endswith(".pdf")} >= {1}


def test_streams(rag, command, told, questions):
    wanted = command(questions[0], "--engine", "pced")
    engine = RagKVQueryEngine(rag, engine="pced", streaming=True)
    response = engine.query(questions[0])
    assert isinstance(response, StreamingResponse)
    assert "finish_reason" not in response.metadata
    pieces = list(response.response_gen)
    assert len(pieces) > 3
    assert "".join(pieces).strip() == wanted["answer"]
    assert response.metadata["finish_reason"] == wanted["finish_reason"]
    won = [node.metadata["tokens_won"] for node in response.source_nodes]
    assert won == [source["tokens_won"] for source in wanted["sources"]]
    assert told.names() == SEQUENCE

    left = engine.query(questions[0])
    first = next(left.response_gen)
    left.response_gen.close()
    assert (first, left.metadata["finish_reason"]) == (pieces[0], "cancelled")


def test_tasks_share_the_steps_of_the_model(rag, questions, monkeypatch):
    """The first step waits until all have asked: from then on their rows stand in the same steps."""
    runtime, honest, all_asked = rag.index.runtime, rag.model.step, threading.Event()
    submit, asked, rows = runtime.submit, [], []

    def submitted(*arguments, **more):
        job = submit(*arguments, **more)
        asked.append(job)
        if len(asked) == 3:
            all_asked.set()
        return job

    def held(found, *arguments, **more):
        assert all_asked.wait(600)
        rows.append(len(found))
        return honest(found, *arguments, **more)

    wanted = [rag.query(question, engine="block").text for question in questions[:3]]
    monkeypatch.setattr(runtime, "submit", submitted)
    monkeypatch.setattr(rag.model, "step", held)

    async def run():
        engine = RagKVQueryEngine(rag, engine="block")
        return await asyncio.gather(*(engine.aquery(question) for question in questions[:3]))

    assert [str(answer) for answer in asyncio.run(run())] == wanted
    assert max(rows) == 3


def test_async_leaves_the_loop_free(rag, told, questions, monkeypatch):
    """Every answer waits in its second step for the loop, which would never come if it were blocked."""
    honest, steps, go_on = rag.model.step, [], threading.Event()

    def held(*arguments, **more):
        steps.append(1)
        if len(steps) > 1:
            assert go_on.wait(600)
        return honest(*arguments, **more)

    monkeypatch.setattr(rag.model, "step", held)

    async def run():
        engine = RagKVQueryEngine(rag, engine="ape")

        async def beat():
            while len(steps) < 2:
                await asyncio.sleep(0.01)
            go_on.set()

        heart = asyncio.create_task(beat())
        answers = await asyncio.gather(*(engine.aquery(question) for question in questions[:3]))
        await heart
        stream = await RagKVQueryEngine(rag, engine="ape", streaming=True).aquery(questions[0])
        assert isinstance(stream, AsyncStreamingResponse)
        pieces = [piece async for piece in stream.async_response_gen()]
        return [str(answer) for answer in answers], "".join(pieces).strip(), stream.metadata

    answers, streamed, metadata = asyncio.run(run())
    assert answers == [rag.query(question, engine="ape").text for question in questions[:3]]
    assert streamed == answers[0]
    assert metadata["finish_reason"] == "stop"
    assert told.among("SynthesizeStartEvent", "SynthesizeEndEvent").count("SynthesizeEndEvent") == 4


def test_an_async_stream_that_is_left_ends_its_answer(rag, questions, monkeypatch):
    HeldModel(rag, monkeypatch, last=6)

    async def run():
        stream = await RagKVQueryEngine(rag, engine="full", streaming=True).aquery(questions[0])
        async for _ in stream.response_gen:
            break
        await stream.response_gen.aclose()
        return stream.metadata["finish_reason"]

    assert asyncio.run(run()) == "cancelled"


def test_retrieve_and_synthesize_apart(rag, questions):
    engine = RagKVQueryEngine(rag, top_k=3)
    bundle = QueryBundle(questions[1])
    nodes = engine.retrieve(bundle)
    assert [n.node_id for n in nodes] == [s.chunk.chunk_id for s in rag.retrieve(questions[1], top_k=3)]
    more = NodeWithScore(node=TextNode(text="A note in the margin.", id_="note"))
    response = engine.synthesize(bundle, nodes, [more])
    assert str(response) == rag.query(questions[1], top_k=3).text
    assert [n.node_id for n in response.source_nodes] == [*(n.node_id for n in nodes), "note"]
    assert str(asyncio.run(engine.asynthesize(bundle, nodes))) == str(response)
    asked = engine.synthesize(QueryBundle(questions[0]), nodes)  # other nodes than its own retrieval
    assert str(asked) == rag.query(questions[0], chunks=rag.retrieve(questions[1], top_k=3)).text


def test_nothing_found(rag, told):
    engine = RagKVQueryEngine(rag)
    assert str(engine.synthesize(QueryBundle("What?"), [])) == "Empty Response"
    assert str(engine.query("zzzqqq xxyyzz")) == "Empty Response"
    streaming = RagKVQueryEngine(rag, streaming=True)
    assert str(streaming.query("zzzqqq xxyyzz")) == "Empty Response"

    async def run():
        response = await streaming.aquery("zzzqqq xxyyzz")
        return [piece async for piece in response.async_response_gen()]

    assert asyncio.run(run()) == ["Empty Response"]


def test_from_index_and_bad_settings(rag, questions):
    engine = RagKVQueryEngine.from_index(rag.folder, engine="block", top_k=2, max_new_tokens=3, device="cpu")
    response = engine.query(questions[0])
    engine.close()
    assert (response.metadata["finish_reason"], len(response.source_nodes)) == ("length", 2)
    assert response.metadata["decoding"]["max_new_tokens"] == 3
    with pytest.raises(UsageError, match="Unknown engine 'turbo'"):
        RagKVQueryEngine(rag, engine="turbo")
    with pytest.raises(UsageError, match="max-new-tokens"):
        RagKVQueryEngine(rag, max_new_tokens=0).query(questions[0])
