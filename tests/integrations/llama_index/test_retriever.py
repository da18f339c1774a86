"""ragkv's retriever and reranker, and LlamaIndex' retrievers with ragkv's engines."""

import asyncio
import math
import re
import zlib
from dataclasses import replace

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from ragkv.errors import UsageError
from ragkv.integrations.llama_index import RagKVIngest, RagKVQueryEngine, RagKVRerank, RagKVRetriever
from ragkv.retrievers import fuse, normalise_rerank, normalise_retrieval

FACTS = [
    "Halden Works was founded by Soren Marowood.",
    "Linodyne Paper was founded by Gilea Casinberg.",
    "Varn Pumps was founded by Ole Brandt.",
    "Kesk Mills was founded by Tova Lind.",
]
WHO = "Who founded Linodyne Paper?"


class WordEmbedding(BaseEmbedding):
    """Cosine similarity of the words of two texts."""

    def _get_text_embedding(self, text):
        vector = [0.0] * 256
        for word in re.findall(r"\w+", text.lower()):
            vector[zlib.crc32(word.encode()) % 256] += 1.0
        return vector

    def _get_query_embedding(self, query):
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query):
        return self._get_text_embedding(query)


class Letters:
    """A reranker by the number of times a text contains the question's first letter."""

    name = "letters"

    def score(self, question, texts):
        return [float(text.lower().count(question[0].lower())) - 2.0 for text in texts]


class Given(BaseRetriever):
    def __init__(self, nodes):
        self.nodes = nodes
        super().__init__()

    def _retrieve(self, query_bundle):
        return self.nodes


def test_the_retriever(rag, result, questions):
    retriever = RagKVRetriever(rag, top_k=3)
    nodes = retriever.retrieve(questions[0])
    wanted = rag.retrieve(questions[0], top_k=3)
    assert [(n.node_id, n.score) for n in nodes] == [(s.chunk.chunk_id, s.score) for s in wanted]
    assert [n.metadata["retrieval_score"] for n in nodes] == [s.retrieval_score for s in wanted]
    assert [n.node_id for n in asyncio.run(retriever.aretrieve(questions[0]))] == [n.node_id for n in nodes]
    assert result.names() == ["RetrievalStartEvent", "RetrievalEndEvent"] * 2


def test_the_indexs_own_reranker_is_told_of(rag, result, questions, monkeypatch):
    chunks = rag.retrieve(questions[0], top_k=3)
    judged = [replace(s, rerank_score=float(i)) for i, s in enumerate(reversed(chunks))]
    monkeypatch.setattr(rag, "retrieve", lambda *_, **__: judged)
    nodes = RagKVRetriever(rag).retrieve(questions[0])
    assert [n.metadata["rerank_score"] for n in nodes] == [0.0, 1.0, 2.0]
    assert nodes[0].metadata["stages"] == {"bm25": chunks[2].retrieval_score}
    assert result.names() == ["RetrievalStartEvent", "ReRankStartEvent", "ReRankEndEvent", "RetrievalEndEvent"]
    start, end = result.events[1:3]
    assert [n.node_id for n in start.nodes] == [s.chunk.chunk_id for s in chunks]
    assert [n.node_id for n in end.nodes] == [n.node_id for n in nodes]


def test_reranking_keeps_all_scores(rag, result, questions):
    nodes = RagKVRetriever(rag, top_k=6).retrieve(questions[0])
    before = [dict(n.metadata) for n in nodes]
    ranked = RagKVRerank(Letters(), top_n=4).postprocess_nodes(nodes, query_str="what?")
    assert [n.metadata for n in nodes] == before
    assert len(ranked) == 4
    raw = {n.node_id: n for n in nodes}
    for node in ranked:
        logit = float(node.text.lower().count("w")) - 2.0
        retrieval = raw[node.node_id].metadata["retrieval_score"]
        score = fuse(normalise_retrieval(retrieval, "sparse"), normalise_rerank(logit))
        assert (node.metadata["retrieval_score"], node.metadata["rerank_score"]) == (retrieval, logit)
        assert node.metadata["fused_score"] == node.score == pytest.approx(score)
    assert [n.score for n in ranked] == sorted((n.score for n in ranked), reverse=True)
    start, end = result.events[-2:]
    assert (start.class_name(), end.class_name()) == ("ReRankStartEvent", "ReRankEndEvent")
    assert (start.model_name, start.top_n, len(start.nodes)) == ("letters", 4, 6)
    assert [n.node_id for n in end.nodes] == [n.node_id for n in ranked]
    assert RagKVRerank(Letters()).postprocess_nodes([], query_str="what?") == []


def test_an_answer_decodes_with_the_fused_scores(rag, result, questions):
    engine = RagKVQueryEngine(rag, engine="pced", top_k=6, node_postprocessors=[RagKVRerank(Letters(), top_n=3)])
    response = engine.query(questions[0])
    ranked = engine.retrieve(QueryBundle(questions[0]))
    scored = {s.chunk.chunk_id: s.chunk for s in rag.retrieve(questions[0], top_k=6)}
    assert [n.node_id for n in response.source_nodes] == [n.node_id for n in ranked]
    assert all(n.node_id in scored for n in ranked)
    assert all(n.metadata["rerank_score"] is not None for n in response.source_nodes)
    assert result.names().index("ReRankEndEvent") < result.names().index("SynthesizeStartEvent")
    again = asyncio.run(engine.aquery(questions[0]))
    assert str(again) == str(response)


def test_what_a_reranker_refuses():
    with pytest.raises(UsageError, match="top_n must be at least 1"):
        RagKVRerank(Letters(), top_n=0)
    with pytest.raises(UsageError, match="needs the question"):
        RagKVRerank(Letters()).postprocess_nodes([NodeWithScore(node=TextNode(text="a"))])


def test_a_vector_store_in_front(own):
    """Stored nodes use their stored KV; nothing is encoded."""
    nodes = [TextNode(text=text, id_=f"fact-{i}") for i, text in enumerate(FACTS)]
    RagKVIngest(own)(nodes)
    retriever = VectorStoreIndex(nodes, embed_model=WordEmbedding()).as_retriever(similarity_top_k=3)
    response = RagKVQueryEngine(own, engine="block", retriever=retriever).query(WHO)
    assert response.source_nodes[0].node_id == "fact-1"
    assert "Gilea Casinberg" in str(response)
    assert (response.metadata["kv"]["hits"], response.metadata["kv"]["misses"]) == (3, 0)
    nearest = retriever.retrieve(WHO)
    assert [n.score for n in response.source_nodes] == [n.score for n in nearest]
    assert response.source_nodes[0].metadata["fused_score"] == pytest.approx((nearest[0].score + 1) / 2)
    assert "fused_score" not in nodes[1].metadata  # the vector store's own nodes are unchanged
    chunks = [s for n in nearest for s in own.retrieve(FACTS[int(n.node_id[-1])], top_k=1)]
    assert str(response) == own.query(WHO, engine="block", chunks=chunks).text


def test_nodes_that_the_index_does_not_know(own):
    RagKVIngest(own)([TextNode(text=FACTS[0], id_="known"), TextNode(text=FACTS[3], id_="stale")])
    own.model  # noqa: B018 - loaded
    nodes = [
        NodeWithScore(node=TextNode(text=FACTS[1], id_="new"), score=0.9),
        NodeWithScore(node=TextNode(text=FACTS[2], id_="stale"), score=0.8),  # the id of another text
        NodeWithScore(node=TextNode(text=FACTS[0], id_="known"), score=None),
        NodeWithScore(node=TextNode(text=FACTS[1], id_="new"), score=0.1),  # twice
        NodeWithScore(node=TextNode(text=" \n", id_="blank"), score=0.7),
    ]
    engine = RagKVQueryEngine(own, engine="block", retriever=Given(nodes))
    response = engine.query(WHO)
    assert "Gilea Casinberg" in str(response)
    assert [n.node_id for n in response.source_nodes] == ["new", "stale", "known"]
    assert [n.metadata["fused_score"] for n in response.source_nodes] == pytest.approx([0.95, 0.9, 0.5])
    assert (response.metadata["kv"]["hits"], response.metadata["kv"]["misses"]) == (1, 2)
    own.maintenance.settle()
    records = own.store.stats().kv_records
    assert own.maintenance.verify().ok
    assert own.store.chunk("stale").text == FACTS[3]

    own.store.memory("cpu", budget=0)
    keeping = RagKVQueryEngine(own, engine="block", retriever=Given(nodes), keep=True)
    assert keeping.query(WHO).metadata["kv"]["misses"] == 2
    own.maintenance.settle()
    assert own.store.stats().kv_records == records + 2
    assert keeping.query(WHO).metadata["kv"]["hits"] == 3
    assert own.maintenance.verify().ok
    assert own.maintenance.gc().index_records == 2
    assert str(keeping.query(WHO)) == str(response)


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_score_must_be_a_number(own, score):
    RagKVIngest(own)([TextNode(text=FACTS[0], id_="known")])
    nodes = [NodeWithScore(node=TextNode(text=FACTS[0], id_="known"), score=score)]
    with pytest.raises(UsageError, match="finite numbers"):
        RagKVQueryEngine(own, retriever=Given(nodes)).query(WHO)
