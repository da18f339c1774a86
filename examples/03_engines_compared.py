"""One question through every engine: the same chunks, read together in different ways (docs/engines.md)."""

import os

from ragkv import RagKV

QUESTION = "How many people work at Yeladquor Pumps?"

with RagKV.open(os.environ.get("RAGKV_INDEX", "example-index")) as rag:
    rag.query(QUESTION, max_new_tokens=1)  # loads the model
    for engine in ("full", "block", "ape", "pced"):
        answer = rag.query(QUESTION, engine=engine, top_k=4)
        kv = f"KV of {answer.kv.hits} chunks read" if answer.kv.hits else "prefilled anew"
        print(f"{engine:6} {answer.text} ({kv})")

    # pced has one expert per chunk, and counts the tokens that each has won: a citation
    best = max(answer.sources, key=lambda source: source.tokens_won or 0)
    print(f"pced's answer is from {best.document}: {best.tokens_won} tokens")
