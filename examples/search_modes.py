"""How well mini's embedder and reranker find passages of generated worlds, in every mode, with and without reranking.

Two kinds of question: by name, and by description (at most one word, stop words aside, is in the passage). The same
for real manuals: `examples/manuals/fetch.sh` and `ragkv eval retrieval` (docs/retrieval.md has both tables).
"""

import argparse
import random

from transformers import AutoTokenizer

from ragkv.config import MODES
from ragkv.finetune.retrieval_data import world_step
from ragkv.index.search import Searcher
from ragkv.mini import embedder_path
from ragkv.retrievers import BM25, DenseIndex, SparseIndex, load_embedder, load_reranker
from ragkv.worlds.paraphrase import shared_words

EMBEDDER = load_embedder("mini", device="cpu")
RERANKER = load_reranker("mini", device="cpu")


def searcher(passages: list[str]) -> Searcher:
    """Over passages whose ids are their places."""
    texts = {str(place): text for place, text in enumerate(passages)}
    said = EMBEDDER.embed_documents(passages)
    dense, sparse, words = DenseIndex(), SparseIndex(), BM25()
    dense.update(zip(texts, said.dense, strict=True), (), generation=1, embedder="mini")
    sparse.update(zip(texts, said.sparse, strict=True), (), generation=1, embedder="mini")
    words.build(texts.items(), 1)
    late = dict(zip(texts, said.colbert, strict=True))
    return Searcher(
        embedder=EMBEDDER,
        indexes={"dense": dense, "sparse": sparse},
        bm25=words,
        texts=lambda ids: {i: texts[i] for i in ids},
        colbert=lambda ids: {i: late[i] for i in ids},
        reranker=RERANKER,
    )


def measure(worlds: int, asks: int) -> dict[tuple[str, str], list[bool]]:
    """Whether an answering passage was among the first five, by mode and kind of question."""
    tokenizer, found = AutoTokenizer.from_pretrained(embedder_path()), {}
    for seed in range(worlds):
        rng = random.Random(f"ragkv-retrieval-measure:{seed}")
        step = world_step(rng, tokenizer, split="heldout", worlds=1, size=60, asks=160)
        search = searcher(step.passages)
        kinds: dict[str, list] = {"named": [], "described": []}
        for ask in step.asks:
            if all(shared_words(ask.question, step.passages[place]) <= 1 for place in ask.answers):
                kinds["described"].append(ask)
            elif ask.named:
                kinds["named"].append(ask)
        for kind, group in kinds.items():
            for ask in group[:asks]:
                for mode in MODES:
                    for rerank in (False, True):
                        hits = search.search(ask.question, mode=mode, top_k=5, candidates=32, rerank=rerank)
                        right = any(int(hit.chunk_id) in ask.answers for hit in hits)
                        found.setdefault((mode + "+rerank" * rerank, kind), []).append(right)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, default=4, help="held-out worlds, each a corpus of its own")
    parser.add_argument("--asks", type=int, default=30, help="questions of each kind and world, at most")
    given = parser.parse_args()
    for (mode, kind), right in sorted(measure(given.worlds, given.asks).items()):
        print(f"{mode:15} {kind:10} recall@5 {sum(right) / len(right):6.1%} of {len(right)}")
