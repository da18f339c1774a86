"""The query engine: the command's answers, sources, metadata, events, streams, and an event loop."""

import asyncio
import copy
import pickle
import pickletools
import threading

import pytest
from heldmodel import HeldModel
from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.chat_engine import CondenseQuestionChatEngine
from llama_index.core.llms import CompletionResponse, CustomLLM, LLMMetadata
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.tools import QueryEngineTool
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters
from script import written

from ragkv import RagKV
from ragkv.errors import ConfigError, UsageError
from ragkv.integrations.llama_index import RagKVQueryEngine, RagKVRerank, RagKVRetriever

SEQUENCE = [
    "QueryStartEvent",
    "RetrievalStartEvent",
    "RetrievalEndEvent",
    "SynthesizeStartEvent",
    "SynthesizeEndEvent",
    "QueryEndEvent",
]


class FixedLLM(CustomLLM):
    """Answers with `says[key]` for the first key in its prompt; fails without one."""

    says: dict[str, str]

    @property
    def metadata(self):
        return LLMMetadata(model_name="fixed")

    def complete(self, prompt, formatted=False, **_):
        return CompletionResponse(text=next(text for key, text in self.says.items() if key in prompt))

    def stream_complete(self, prompt, formatted=False, **_):
        raise NotImplementedError


@pytest.mark.parametrize("engine", ["full", "block", "pced"])
def test_an_answer_is_the_commands(rag, command, result, questions, engine):
    wanted = command(questions[2], "--engine", engine, "--top-k", "4", "--max-new-tokens", "24")
    response = RagKVQueryEngine(rag, engine=engine, top_k=4, max_new_tokens=24).query(questions[2])
    assert str(response) == wanted["answer"]
    assert result.names() == SEQUENCE
    assert result.events[4].response is response
    scores = ("retrieval_score", "rerank_score", "tokens_won", "snippet", "highlights")
    shown = [
        (n.metadata["document"], n.node_id, n.text, n.metadata.get("page"), n.score, *map(n.metadata.get, scores))
        for n in response.source_nodes
    ]
    keys = ["document", "chunk_id", "text", "page", "score", *scores]
    assert shown == [tuple(source[key] for key in keys) for source in wanted["sources"]]
    metadata = response.metadata
    assert {k: metadata[k] for k in ("engine", "finish_reason")} == {k: wanted[k] for k in ("engine", "finish_reason")}
    assert (metadata["kv"]["hits"], metadata["kv"]["misses"]) == (wanted["kv"]["hits"], wanted["kv"]["misses"])
    timing = metadata["timing_ms"]
    stages = timing["retrieve"] + timing["load"] + timing["first_token"]
    assert timing["total"] + 0.01 >= stages > 0  # each is rounded to a microsecond


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


def test_streams(rag, command, result, questions):
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
    assert result.names() == SEQUENCE

    left = engine.query(questions[0])
    first = next(left.response_gen)
    left.response_gen.close()
    assert (first, left.metadata["finish_reason"]) == (pieces[0], "cancelled")


def test_async_leaves_the_loop_free(rag, result, questions, monkeypatch):
    """In its second step, every answer waits for the event loop, so a blocked loop would hang."""
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
    assert result.among("SynthesizeStartEvent", "SynthesizeEndEvent").count("SynthesizeEndEvent") == 4


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
    asked = engine.synthesize(QueryBundle(questions[0]), nodes)  # not the nodes that it retrieves itself
    assert str(asked) == rag.query(questions[0], chunks=rag.retrieve(questions[1], top_k=3)).text


def test_the_nodes_of_several_steps(rag, questions, monkeypatch):
    written(monkeypatch, ["block"], {questions[0]: [questions[2], "", "An answer."] * 2})
    expected = rag.query(questions[0], engine="block", top_k=2, steps=3)
    assert (len(expected.queries), expected.text) == (1, "An answer.")
    response = RagKVQueryEngine(rag, engine="block", top_k=2, steps=3).query(questions[0])
    assert (str(response), response.metadata["queries"]) == (expected.text, list(expected.queries))
    assert [node.node_id for node in response.source_nodes] == [source.chunk_id for source in expected.sources]
    assert {node.node_id for node in response.source_nodes} > {node.node_id for node in response.source_nodes[:1]}
    with pytest.raises(UsageError, match="steps is for ragkv's own retriever"):
        RagKVQueryEngine(rag, retriever=RagKVRetriever(rag), steps=2)


def test_nothing_found(rag, result):
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
    with pytest.raises(UsageError, match="score_kind must be one of dense, sparse, colbert, not 'cosine'"):
        RagKVQueryEngine(rag, score_kind="cosine")
    with pytest.raises(UsageError, match="max-new-tokens"):
        RagKVQueryEngine(rag, max_new_tokens=0).query(questions[0])


# ---- composition


def test_query_engine_tool(rag, command, result, questions):
    tool = QueryEngineTool.from_defaults(RagKVQueryEngine(rag, engine="block"), name="companies", description="Firms.")
    wanted = command(questions[0], "--engine", "block")
    output = tool.call(questions[0])
    assert output.content == wanted["answer"]
    assert [n.node_id for n in output.raw_output.source_nodes] == [s["chunk_id"] for s in wanted["sources"]]
    assert result.names() == SEQUENCE
    assert asyncio.run(tool.acall(input=questions[0])).content == wanted["answer"]
    assert result.names() == SEQUENCE * 2


def test_condense_question_chat_engine(rag, command, result, questions):
    llm = FixedLLM(says={"And what does it make?": questions[2]})
    first, second = (command(question, "--engine", "ape")["answer"] for question in (questions[1], questions[2]))
    memory = ChatMemoryBuffer.from_defaults(token_limit=4000)  # the default one does not close its SQLite connection
    chat = CondenseQuestionChatEngine.from_defaults(RagKVQueryEngine(rag, engine="ape"), llm=llm, memory=memory)
    assert str(chat.chat(questions[1])) == first
    reply = chat.chat("And what does it make?")
    assert str(reply) == second
    assert reply.source_nodes[0].metadata["document"] == "halillex-robotics.md"
    assert result.among(*SEQUENCE) == SEQUENCE * 2
    assert result.events[len(SEQUENCE) :][-1].query.query_str == questions[2]

    streaming = RagKVQueryEngine(rag, engine="ape", streaming=True)
    chat = CondenseQuestionChatEngine.from_defaults(streaming, llm=llm, memory=memory)
    pieces = list(chat.stream_chat("And what does it make?").response_gen)
    assert "".join(pieces).strip() == second
    assert result.among(*SEQUENCE) == SEQUENCE * 3


# ---- pickle

FILTERS = MetadataFilters(filters=[MetadataFilter(key="page", value=None, operator="is_empty")])


class Lengths:
    """A reranker of the user."""

    name = "lengths"

    def score(self, question, texts):
        return [float(len(text)) for text in texts]


def again(thing):
    return pickle.loads(pickle.dumps(thing))


@pytest.mark.parametrize("anew", [again, copy.deepcopy])
def test_a_retriever(rag, questions, anew):
    retriever = RagKVRetriever(rag, similarity_top_k=3, filters=FILTERS, search={"retrieval": "bm25"})
    wanted = [n.node_id for n in retriever.retrieve(questions[0])]
    back = anew(retriever)
    assert back.rag is not rag
    assert (back.top_k, back.filters, back.search) == (3, FILTERS, {"retrieval": "bm25"})
    assert [n.node_id for n in back.retrieve(questions[0])] == wanted
    back.rag.close()
    assert [n.node_id for n in retriever.retrieve(questions[0])] == wanted


@pytest.mark.parametrize("anew", [again, copy.deepcopy])
def test_an_engine_with_its_retriever_and_postprocessors(rag, questions, anew):
    engine = RagKVQueryEngine(
        rag,
        engine="block",
        top_k=4,
        max_new_tokens=12,
        decoding={"temperature": 0.5, "seed": 3},
        node_postprocessors=[RagKVRerank(Lengths(), top_n=2)],
    )
    wanted = engine.query(questions[0])
    back = anew(engine)
    assert back.rag is back.retriever.rag
    assert back.rag is not rag
    found = back.query(questions[0])
    assert (str(found), found.metadata["decoding"]) == (str(wanted), wanted.metadata["decoding"])
    assert [n.node_id for n in found.source_nodes] == [n.node_id for n in wanted.source_nodes]
    back.close()
    assert str(engine.query(questions[0])) == str(wanted)


def test_a_pickle_holds_settings_and_nothing_that_is_open(rag, questions):
    engine = RagKVQueryEngine(rag, engine="block")
    before = len(pickle.dumps(engine))
    engine.query(questions[0])
    data = pickle.dumps(engine)
    assert len(data) == before  # neither model nor KV is included
    held = {argument for _, argument, _ in pickletools.genops(data) if isinstance(argument, str)}
    assert str(rag.folder.absolute()) in held
    assert not any(name.startswith(("ragkv.store", "ragkv.model.language_model", "torch", "_thread")) for name in held)


def test_an_index_that_is_gone_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with RagKV.create("there", model="mini", embedder="none", reranker="none") as made:
        data = pickle.dumps(RagKVRetriever(made))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pickle.loads(data).rag as back:  # the absolute path is included
        assert back.folder == tmp_path / "there"
    (tmp_path / "there" / "ragkv.toml").unlink()
    with pytest.raises(ConfigError, match="There is no index at"):
        pickle.loads(data)


def test_a_reranker_is_loaded_again_by_its_name(monkeypatch):
    asked = []
    load = lambda name, **options: asked.append((name, options)) or Lengths()  # noqa: E731
    monkeypatch.setattr("ragkv.integrations.llama_index.query_engine.load_reranker", load)
    named = RagKVRerank("some/reranker", top_n=2, score_kind="sparse", device="cpu", max_tokens=99)
    back = again(named)
    assert asked == [("some/reranker", {"device": "cpu", "max_tokens": 99})] * 2
    assert (back.model_name, back.top_n, back.score_kind) == ("lengths", 2, "sparse")
    serialised = RagKVRerank.from_dict(named.to_dict(), device="cpu")  # as LlamaIndex calls it
    assert asked[-1] == ("lengths", {"device": "cpu", "max_tokens": None})
    assert (serialised.top_n, serialised.score_kind) == (2, "sparse")
