"""Show an answer as it comes, and stop one in the middle."""

import os

from ragkv import RagKV

with RagKV.open(os.environ.get("RAGKV_INDEX", "example-index")) as rag:
    stream = rag.stream("Who started Pelophor Press?")
    for piece in stream:
        print(piece, end="", flush=True)
    timing = stream.answer.timing
    print(f"\nfirst token after {timing.load + timing.first_token:.0f} ms, all after {timing.total:.0f} ms")

    with rag.stream("In which year was Parinphor Brewery founded?") as stream:  # leaving the block ends the answer
        for piece, _ in zip(stream, range(3), strict=False):
            print(piece, end="")
    print(f" ... {stream.answer.finish_reason}")
