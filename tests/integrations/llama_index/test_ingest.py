"""LlamaIndex' nodes are stored and returned unchanged; ingested again, changed, deleted."""

import asyncio
import pickle

import pytest
from llama_index.core import Document
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode

from ragkv.errors import StoreError, UsageError
from ragkv.integrations.llama_index import RagKVIngest, RagKVQueryEngine, RagKVRetriever
from ragkv.integrations.llama_index.nodes import bundle

HALDEN = (
    "Halden Works makes the Brivet. Halden Works was founded by Mira Oskel. Halden Works has its head office in Varn."
)
BOLT = "Bolt Ltd makes valves. Bolt Ltd was founded by Ann Lee."
WHO = "Who founded Halden Works?"


def documents(halden: str = HALDEN) -> list[Document]:
    return [
        Document(text=halden, id_="halden", metadata={"file_name": "halden.txt", "page_label": "3", "year": 1907}),
        Document(text=BOLT, id_="bolt", metadata={"file_name": "bolt.txt"}),
    ]


def pipeline(step: RagKVIngest) -> IngestionPipeline:
    """With ids by position, because `SentenceSplitter`'s own are random."""
    splitter = SentenceSplitter(chunk_size=40, chunk_overlap=6, id_func=lambda i, doc: f"{doc.id_}-{i}")
    return IngestionPipeline(transformations=[splitter, step])


def test_nodes_become_chunks_and_come_back_as_they_were(own):
    step = RagKVIngest(own)
    nodes = pipeline(step).run(documents=documents())
    assert step.report.added == ["halden", "bolt"]
    assert {c.chunk_id for c in own.store.chunks()} == {n.node_id for n in nodes}
    assert len(nodes) > 2
    assert own.store.text("bolt") == BOLT
    assert own.maintenance.verify().ok
    by_id = {n.node_id: n.node for n in RagKVRetriever(own, top_k=9).retrieve("Halden Works Bolt Ltd founded makes")}
    for node in nodes:
        back = by_id[node.node_id]
        assert (back.text, back.ref_doc_id) == (node.text, node.ref_doc_id)
        assert (back.start_char_idx, back.end_char_idx) == (node.start_char_idx, node.end_char_idx)
        assert {key: back.metadata[key] for key in node.metadata} == node.metadata
        assert back.metadata["document"] == node.metadata["file_name"]
        assert {k: i.node_id for k, i in back.relationships.items()} == {
            k: i.node_id for k, i in node.relationships.items()
        }
    assert by_id["halden-0"].metadata["page"] == 3
    narrow = RagKVRetriever(own, top_k=9, search={"where": ("year=1907",)})
    narrow = narrow.retrieve("Who founded what, and who makes what?")
    assert {n.node.ref_doc_id for n in narrow} == {"halden"}
    answer = RagKVQueryEngine(own, engine="block").query(WHO)
    assert "Mira Oskel" in str(answer)
    assert answer.metadata["kv"]["misses"] == 0


def test_again_changed_and_deleted(own):
    step = RagKVIngest(own)
    pipeline(step).run(documents=documents())
    held = own.store.generation
    pipeline(step).run(documents=documents())
    assert (step.report.unchanged, step.report.kv_encoded, own.store.generation) == (["halden", "bolt"], 0, held)

    same, moved = pipeline(step), HALDEN.replace("Varn", "Oskau")
    same.run(documents=documents(moved))
    assert (step.report.updated, step.report.unchanged) == (["halden"], ["bolt"])
    assert 0 < step.report.kv_encoded < step.report.chunks  # the sentences before it are unchanged
    assert step.report.kv_reused > 0
    assert "Oskau" in own.store.text("halden")
    assert own.maintenance.verify().ok

    assert step.delete("bolt")
    assert not step.delete("bolt")
    assert {c.document_id for c in own.store.chunks()} == {"halden"}
    same.run(documents=documents(moved))  # the pipeline's cache does not hide a deletion
    assert (step.report.added, step.report.unchanged) == (["bolt"], ["halden"])


def test_other_ids_for_the_same_text_encode_nothing(own):
    RagKVIngest(own)([TextNode(text=BOLT, id_="first")])
    step = RagKVIngest(own)
    asyncio.run(step.acall([TextNode(text=BOLT, id_="second"), TextNode(text="  ", id_="blank")]))
    assert (step.report.added, step.report.kv_encoded) == (["second"], 0)
    assert {c.document_id for c in own.store.chunks()} == {"first", "second"}


def test_an_id_belongs_to_one_source(own):
    step = RagKVIngest(own)
    step([TextNode(text=BOLT, id_="n", relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id="one")})])
    with pytest.raises(StoreError, match="belongs to another document"):
        step([TextNode(text=BOLT, id_="n", relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id="two")})])
    with pytest.raises(UsageError, match="two chunks called 'n'"):
        step([TextNode(text=text, id_="n", relationships=source("one")) for text in ("a", "b")])
    with pytest.raises(UsageError, match="either a RagKV or the folder"):
        RagKVIngest()


def source(name):
    return {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=name)}


def test_a_worker_gets_the_folder_and_opens_it(own):
    step = pickle.loads(pickle.dumps(RagKVIngest(own, device="cpu")))
    step([TextNode(text=BOLT, id_="n")])
    assert step.report.added == ["n"]
    assert own.store.chunk("n").text == BOLT
    step.rag.close()
    assert RagKVIngest.from_dict(RagKVIngest(own).to_dict()).index == str(own.folder)


@pytest.mark.parametrize(
    ("result", "kept", "text"),
    [
        ((0, 6), (0, 6), "one,\n\ntwo."),
        ((3, 0), (0, 6), "one,\n\ntwo."),  # contradictory: none is used
        ((None, 2), (8, 2), "\n\ntwo.\n\none,"),
        ((None, None), (0, 6), "one,\n\ntwo."),
        ((0, 90_000), (0, 6), "one,\n\ntwo."),  # almost only a gap
        ((-1, 0), (6, 0), "two.\n\none,"),
    ],
)
def test_offsets_are_kept_where_they_can_be(result, kept, text):
    nodes = [TextNode(text=t, id_=t, start_char_idx=at) for t, at in zip(["one,", "two."], result, strict=True)]
    ready = bundle("d", nodes)
    assert (tuple(chunk.start for chunk in ready.chunks), ready.text) == (kept, text)
    for chunk in ready.chunks:
        assert ready.text.startswith(chunk.text, chunk.start)


def test_metadata_of_any_kind():
    nodes = [
        TextNode(text="a", metadata={"when": {1, 2}, "header_path": "/Guide/Setup/", "page_label": "iv"}),
        TextNode(text="b", metadata={"source": "b.md", "page": 10**20}),
    ]
    first, second = bundle("d", nodes).chunks
    assert (first.heading, first.page, second.heading, second.page) == ("Guide > Setup", None, None, None)
    assert bundle("d", nodes).document.content_hash == bundle("d", nodes).document.content_hash
    assert bundle("d", nodes[:1]).document.content_hash != bundle("d", nodes).document.content_hash
