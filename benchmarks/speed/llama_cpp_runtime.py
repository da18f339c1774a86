"""Answers by the runtime llama-cpp from a store; in a process of its own, the memory that one takes.

Nothing here imports torch, which such an answer does not need.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ragkv.engines import ContextChunk, Request, make_engine
from ragkv.model.checkpoint import Checkpoint
from ragkv.runtime import Stream, llama_cpp_executor, runtime_of
from ragkv.store import Half, KVIdentity, Store
from ragkv.types import Encoding

if TYPE_CHECKING:
    from ragkv.model.language_model import LanguageModel


@contextmanager
def answering(file: Path, index: Path, prompt: Sequence[Sequence[int]]) -> Iterator[tuple[Callable[[], Stream], float]]:
    """A function that begins an answer by `block`, and the bytes of a stored token.

    `prompt` holds the ids of prefix, chunks and question. A store in the folder `index` is filled if it is new: one
    chunk of each length is encoded, and the others get its KV, whose values do not affect time.
    """
    checkpoint = Checkpoint(name=file.name, location=str(file.parent), local=True, file=file.name)
    lm = llama_cpp_executor.load(checkpoint, dtype="auto", device="cpu", codec="half")
    lm.require_positions(sum(map(len, prompt)))
    of = partial(KVIdentity, model="bench", encoding=Encoding.STANDALONE, prefix_ids=())
    identities = [of(chunk_ids=tuple(ids)) for ids in prompt[:-1]]
    new, engine, runtime = not index.exists(), make_engine("block", {}), runtime_of(cast("LanguageModel", lm))
    with Store.create(index, codec=Half()) if new else Store.open(index) as store:
        if new:
            encoded = {len(ids): ids for ids in prompt[:-1]}
            kvs = dict(zip(encoded, lm.encode(list(encoded.values())), strict=True))
            store.stage_kv((identity, kvs[len(identity.chunk_ids)]) for identity in identities)

        def begin() -> Stream:
            head, *chunks = store.get_many(identities, shape=lm.kv_shape).items()
            request = Request(
                prefix_ids=head[0].chunk_ids,
                prefix=head[1],
                chunks=tuple(ContextChunk(token_ids=chunk.chunk_ids, score=0.5, kv=kv) for chunk, kv in chunks),
                suffix_ids=tuple(prompt[-1]),
            )
            return Stream(runtime, engine, request)

        yield begin, store.kv_bytes / sum(map(len, prompt[:-1]))


def main(file: str, index: str, steps: str) -> None:
    """Answer the prompt on the standard input, and print the most memory that this process had, in KiB."""
    import resource

    with answering(Path(file), Path(index), json.load(sys.stdin)) as (begin, _):
        answer = begin()
        for _ in range(int(steps)):
            answer.advance(answer.best())
        sys.stdout.write(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))


if __name__ == "__main__":
    main(*sys.argv[1:])
