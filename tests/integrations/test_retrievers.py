"""The retrievers for LangChain and Haystack, with the real packages."""

from __future__ import annotations

import asyncio
import sys
import sysconfig
from importlib import import_module
from pathlib import Path

import pytest
from indexed import PAIR, write_texts

from ragkv import RagKV

pytestmark = pytest.mark.slow
QUESTION = "Who founded Halden Works?"
CLIENTS = sysconfig.get_path("purelib", vars={"base": str(Path(sys.prefix) / "clients")})


@pytest.fixture(scope="module")
def rag(tmp_path_factory):
    documents = write_texts(tmp_path_factory.mktemp("documents"), PAIR)
    with RagKV.create(tmp_path_factory.mktemp("indexes") / "pair", device="cpu") as made:
        made.ingest(documents)
        yield made


@pytest.fixture(scope="module")
def framework():
    """A module of one that is installed here or among the server's clients (`make clients`), behind what is here."""
    before = [*sys.path]
    sys.path.append(CLIENTS)
    patch = pytest.MonkeyPatch()
    patch.setenv("HAYSTACK_TELEMETRY_ENABLED", "False")
    patch.setenv("LANGSMITH_TRACING", "false")

    def load(name, package):
        try:
            import_module(package)
        except ModuleNotFoundError:
            pytest.skip(f"{package} is not installed: make clients")
        return import_module(f"ragkv.integrations.{name}").RagKVRetriever

    yield load
    sys.path[:] = before
    patch.undo()


def wanted(rag, **options):
    sources = rag.sources(QUESTION, rag.retrieve(QUESTION, **options))
    return [(each.chunk_id, each.text, each.score, each.document, each.snippet) for each in sources]


def langchain(documents):
    facts = [(each.metadata["score"], each.metadata["source"], each.metadata["snippet"]) for each in documents]
    return [(each.id, each.page_content, *more) for each, more in zip(documents, facts, strict=True)]


def haystack(result):
    meta = [(each.score, each.meta["source"], each.meta["snippet"]) for each in result["documents"]]
    return [(each.id, each.content, *more) for each, more in zip(result["documents"], meta, strict=True)]


def test_langchain(rag, framework):
    made = framework("langchain", "langchain_core")
    retriever = made(rag=rag, top_k=2)
    assert langchain(retriever.invoke(QUESTION)) == wanted(rag, top_k=2)
    assert langchain(asyncio.run(retriever.ainvoke(QUESTION, top_k=1))) == wanted(rag, top_k=1)
    where = ("source=*bolt*",)
    assert langchain(retriever.invoke(QUESTION, where=where)) == wanted(rag, top_k=2, where=where)
    assert langchain(made(rag=rag, search={"where": where}).invoke(QUESTION)) == wanted(rag, where=where)
    chain = retriever | (lambda documents: [each.id for each in documents])
    assert chain.batch([QUESTION] * 2) == [[each[0] for each in wanted(rag, top_k=2)]] * 2
    with pytest.raises(ValueError, match="top_j"):
        made(rag=rag, top_j=2)


def test_haystack(rag, framework):
    made = framework("haystack", "haystack")
    pipeline = import_module("haystack").Pipeline()
    pipeline.add_component("retriever", made(rag, top_k=2))
    assert haystack(pipeline.run({"retriever": {"query": QUESTION}})["retriever"]) == wanted(rag, top_k=2)
    where = ["source=*bolt*"]
    result = asyncio.run(made(rag).run_async(QUESTION, where=where))
    assert haystack(result) == wanted(rag, where=where)
    [source] = {each[3] for each in wanted(rag, where=where)}
    filters = {"field": "meta.source", "operator": "==", "value": source}
    assert {each.meta["source"] for each in made(rag, filters=filters).run(QUESTION)["documents"]} == {source}
    trusted = [made.__module__]
    loaded = import_module("haystack").Pipeline.loads(pipeline.dumps(), allowed_modules=trusted)
    again = loaded.get_component("retriever")
    try:
        assert haystack(again.run(QUESTION)) == wanted(rag, top_k=2)
    finally:
        again.rag.close()
