"""How well mini finds passages in every mode, with and without its reranker, and each kind of hybrid search.

Passages of generated worlds are asked for in two ways: by name, and by description (at most one word, stop words aside,
is in the passage). Pieces of Python's language reference are asked for by a sentence with a gap. For the same on real
manuals, see `examples/manuals/fetch.sh` and `benchmarks.evaluation` (docs/retrieval.md has the tables).
"""

import argparse
import random
from collections.abc import Collection

from transformers import AutoTokenizer

from ragkv.benchmarks.evaluation.worlds.text import clozes, english_sentences, reference_texts
from ragkv.benchmarks.evaluation.worlds.world import shared_words
from ragkv.benchmarks.training.mini.retrieval import world_step
from ragkv.config import MODES
from ragkv.index.search import Searcher
from ragkv.mini import embedder_path
from ragkv.retrievers import BM25, DenseIndex, SparseIndex, load_embedder, load_reranker

EMBEDDER = load_embedder("mini", device="cpu")
RERANKER = load_reranker("mini", device="cpu")


def searchers(passages: list[str]) -> dict[str, tuple[Searcher, str]]:
    """Searchers with their modes, by name, over passages whose ids are their indices."""
    texts = {str(place): text for place, text in enumerate(passages)}
    vectors = EMBEDDER.embed_documents(passages)
    dense, sparse, words = DenseIndex(), SparseIndex(), BM25()
    dense.update(zip(texts, vectors.dense, strict=True), (), generation=1, embedder="mini")
    sparse.update(zip(texts, vectors.sparse, strict=True), (), generation=1, embedder="mini")
    words.update(texts.items(), (), generation=1, embedder="")
    late = dict(zip(texts, vectors.colbert, strict=True))

    def over(indexes: dict, fusion: str) -> Searcher:
        return Searcher(
            embedder=EMBEDDER,
            indexes={"bm25": words} | indexes,
            texts=lambda ids: {i: texts[i] for i in ids},
            colbert=lambda ids: {i: late[i] for i in ids},
            reranker=RERANKER,
            fusion=fusion,
        )

    both = {"dense": dense, "sparse": sparse}
    found = {mode: (over(both, "relative"), mode) for mode in MODES}
    found["hybrid, rrf"] = over(both, "rrf"), "hybrid"
    found["hybrid of bm25"] = over({"dense": dense}, "relative"), "hybrid"
    found["hybrid of bm25, rrf"] = over({"dense": dense}, "rrf"), "hybrid"
    return found


def measure(worlds: int, asks: int) -> dict[tuple[str, str], list[bool]]:
    """Whether an answering passage was among the first five, by mode and kind of question."""
    tokenizer, found = AutoTokenizer.from_pretrained(embedder_path()), {}

    def ask(kind: str, over: dict[str, tuple[Searcher, str]], question: str, answers: Collection[int]) -> None:
        for name, (search, mode) in over.items():
            for rerank in (False, True):
                hits = search.search(question, mode=mode, top_k=5, candidates=32, rerank=rerank)
                right = any(int(hit.chunk_id) in answers for hit in hits)
                found.setdefault((name + "+rerank" * rerank, kind), []).append(right)

    for seed in range(worlds):
        rng = random.Random(f"ragkv-retrieval-measure:{seed}")
        step = world_step(rng, tokenizer, split="heldout", worlds=1, size=60, asks=160)
        over = searchers(step.passages)
        kinds: dict[str, list] = {"named": [], "described": []}
        for each in step.asks:
            if all(shared_words(each.question, step.passages[place]) <= 1 for place in each.answers):
                kinds["described"].append(each)
            elif each.named:
                kinds["named"].append(each)
        for kind, group in kinds.items():
            for each in group[:asks]:
                ask(kind, over, each.question, each.answers)
    pieces = [text[at : at + 900] for text in reference_texts() for at in range(0, len(text), 900)]
    over, plain, rng = searchers(pieces), [" ".join(piece.split()) for piece in pieces], random.Random(0)
    for text in rng.sample(reference_texts(), min(worlds * asks // 2, len(reference_texts()))):
        for sentence in english_sentences(text)[:1]:
            for cloze in clozes(rng, sentence):
                if answers := {at for at, piece in enumerate(plain) if sentence in piece}:
                    ask("cloze", over, cloze.question, answers)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, default=4, help="held-out worlds, each a corpus of its own")
    parser.add_argument("--asks", type=int, default=30, help="questions of each kind and world, at most")
    given = parser.parse_args()
    for (mode, kind), right in sorted(measure(given.worlds, given.asks).items()):
        print(f"{mode:26} {kind:10} recall@5 {sum(right) / len(right):6.1%} of {len(right)}")
