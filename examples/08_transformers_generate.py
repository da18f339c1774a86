"""Chunks' stored KV in transformers' own `generate`: a DynamicCache that ragkv filled (Block-Attention §2.5)."""

import os

from ragkv import RagKV
from ragkv.engines import make_engine

QUESTION = "In which year was Parinphor Brewery founded?"

with RagKV.open(os.environ.get("RAGKV_INDEX", "example-index")) as rag:
    engine = make_engine("block", rag.config.tuning, context=rag.config.encoding.context)
    chunks = rag.retrieve(QUESTION, top_k=4)[::-1]  # the best chunk stands next to the question
    request, use = rag.request(engine, QUESTION, chunks)
    inputs = engine.cache(rag.model, request)  # input_ids, attention_mask, past_key_values
    known = inputs["past_key_values"].get_seq_length()
    prompt = inputs["input_ids"].shape[1]
    print(f"{known} of {prompt} prompt tokens are in the cache, {use.tokens} of them from the store")

    with rag.model.plain() as model:  # transformers' own model and attention
        ids = model.generate(**inputs, max_new_tokens=48, do_sample=False)
    print(rag.model.tokens.decode(ids[0, prompt:].tolist()).strip())
    print(rag.query(QUESTION, engine="block", top_k=4).text)  # ragkv's own decoding says the same
