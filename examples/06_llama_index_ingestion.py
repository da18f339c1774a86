"""LlamaIndex reads and cuts the documents, ragkv prefills the nodes once and stores their KV under the same ids."""

import tempfile
from pathlib import Path

from llama_index.core import Document
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter

from ragkv import RagKV
from ragkv.integrations.llama_index import RagKVIngest, RagKVQueryEngine

CORPUS = Path(__file__).parent / "corpus" / "companies"

documents = [
    Document(text=path.read_text(encoding="utf-8"), id_=path.stem, metadata={"file_name": path.name})
    for path in sorted(CORPUS.glob("*.md"))[:3]
]
with tempfile.TemporaryDirectory() as folder, RagKV.create(folder, model="mini", engines=("block",)) as rag:
    step = RagKVIngest(rag)
    # the splitter's own ids are random: named by place, a second run finds nothing to do
    splitter = SentenceSplitter(chunk_size=96, chunk_overlap=0, id_func=lambda i, document: f"{document.id_}-{i}")
    IngestionPipeline(transformations=[splitter, step]).run(documents=documents)
    print(f"{step.report.chunks} nodes stored, {step.report.kv_encoded} encoded")
    IngestionPipeline(transformations=[splitter, step]).run(documents=documents)
    print(f"again: {len(step.report.unchanged)} documents unchanged")

    subject = documents[0].text.splitlines()[0].strip("# ")
    response = RagKVQueryEngine(rag, engine="block", top_k=4).query(f"Who started {subject}?")
    print(response, [node.node_id for node in response.source_nodes])

    print(f"deleted: {step.delete(documents[0].id_)}, {rag.store.stats().documents} documents left")
