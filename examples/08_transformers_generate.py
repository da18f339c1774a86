"""Chunks' stored KV in transformers' own `generate`: a DynamicCache that ragkv filled (Block-Attention §2.5)."""

import os

from ragkv import RagKV

QUESTION = "In which year was Parinphor Brewery founded?"

with RagKV.open(os.environ.get("RAGKV_INDEX", "example-index")) as rag:
    inputs = rag.generate_inputs(QUESTION, engine="block", top_k=4)  # input_ids, attention_mask, past_key_values
    with rag.model.plain() as model:  # transformers' own model and attention
        ids = model.generate(**inputs, max_new_tokens=48, do_sample=False)

    known, prompt = inputs["past_key_values"].get_seq_length(), inputs["input_ids"].shape[1]
    print(f"{known} of {prompt} prompt tokens are in the cache")
    print(rag.model.tokens.decode(ids[0, prompt:].tolist()).strip())
    print(rag.query(QUESTION, engine="block", top_k=4).text)  # ragkv's own decoding says the same
