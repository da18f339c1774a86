"""ragkv as a LlamaIndex query engine, alone and as a tool (`pip install -e '.[llama-index]'`)."""

import os

from llama_index.core.tools import QueryEngineTool

from ragkv.integrations.llama_index import RagKVQueryEngine

engine = RagKVQueryEngine.from_index(os.environ.get("RAGKV_INDEX", "example-index"), engine="pced", top_k=4)
response = engine.query("How many people work at Linodyne Paper?")
print(response)
print({key: response.metadata[key] for key in ("engine", "finish_reason", "kv")})
for node in response.source_nodes:
    place = f"{node.metadata['document']}, characters {node.node.start_char_idx} to {node.node.end_char_idx}"
    print(f"  {node.score:.2f} {place}, {node.metadata['tokens_won']} tokens won")

tool = QueryEngineTool.from_defaults(engine, name="companies", description="Companies and their products.")
print(tool.call("Who started Pelophor Press?").content)

streaming = RagKVQueryEngine(engine.rag, streaming=True)
streaming.query("In which year was Parinphor Brewery founded?").print_response_stream()
print()
engine.close()
