"""Any retriever of LlamaIndex in front of ragkv's engines: here a vector store with an embedder of three lines."""

import os
import re
import zlib

from llama_index.core import VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.schema import TextNode

from ragkv import RagKV
from ragkv.integrations.llama_index import RagKVQueryEngine


class Words(BaseEmbedding):
    """Counts words; put an embedding model of LlamaIndex in its place."""

    def _get_text_embedding(self, text: str) -> list[float]:
        places = [zlib.crc32(word.encode()) % 512 for word in re.findall(r"\w+", text.lower())]
        return [float(places.count(place)) for place in range(512)]

    _get_query_embedding = _get_text_embedding

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


with RagKV.open(os.environ.get("RAGKV_INDEX", "example-index")) as rag:
    # nodes with the ids and texts of the index's chunks start from stored KV
    nodes = [TextNode(id_=chunk.chunk_id, text=chunk.text) for chunk in rag.store.chunks()]
    nodes.append(TextNode(text="Halmeric Tools was founded by Gilea Casinberg."))  # any other is encoded on the fly
    retriever = VectorStoreIndex(nodes, embed_model=Words()).as_retriever(similarity_top_k=4)

    engine = RagKVQueryEngine(rag, retriever=retriever, engine="block")
    response = engine.query("How many people work at Linodyne Paper?")
    print(response, response.metadata["kv"])
    response = engine.query("Who founded Halmeric Tools?")
    print(response, response.metadata["kv"])
