"""Ask every question of a questions.jsonl through every engine: a gold answer must appear in the output.

The columns of the README's table, in its order (one-hop and two-hop questions are counted separately):

    python examples/accuracy.py --dtype float32 --retrieval bm25
    python examples/accuracy.py --dtype float32 --retrieval dense --rerank
    python examples/accuracy.py --dtype float32 --retrieval bm25 --worlds 5

Documents are ingested into a temporary index. `--folder` takes another folder that holds corpus/ and questions.jsonl;
`--worlds N` makes N of them from seeds that nothing else uses (with examples/build_corpus.py, which needs fpdf2).
"""

from __future__ import annotations

import argparse
import json
import runpy
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ragkv import RagKV
from ragkv.config import MODES
from ragkv.errors import RagkvError

HERE = Path(__file__).resolve().parent
ENGINES = ("full", "block", "ape", "pced")
FIRST_SEED = 2001  # of fresh worlds, whose names are held out from mini's training; the shipped corpus is seed 11


def accuracy(rag: RagKV, questions: Sequence[dict[str, Any]], engine: str, **retrieval: Any) -> dict[int, list[bool]]:
    """Whether each question was answered right, by number of hops."""
    found: dict[int, list[bool]] = {}
    for question in questions:
        text = rag.query(question["question"], engine=engine, max_new_tokens=64, **retrieval).text.lower()
        found.setdefault(question["hops"], []).append(any(gold.lower() in text for gold in question["answers"]))
    return found


@contextmanager
def folders(given: Path, worlds: int, seed: int) -> Iterator[list[Path]]:
    """The given folder, or one for each of `worlds` fresh worlds, which are removed afterwards."""
    if not worlds:
        yield [given]
        return
    try:
        build = runpy.run_path(str(HERE / "build_corpus.py"))["build"]
    except ModuleNotFoundError as error:
        raise RagkvError(f"--worlds needs {error.name}; run pip install fpdf2.") from error
    with tempfile.TemporaryDirectory() as place:
        made = [Path(place) / str(seed + at) for at in range(worlds)]
        for folder in made:
            build(int(folder.name), folder)
        yield made


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per engine and number of hops, with "all" of them last where there are several."""
    retrieval = {"retrieval": options.retrieval, "rerank": options.rerank}  # None: as the index says
    right: dict[str, dict[int, list[bool]]] = {engine: {} for engine in options.engines}
    with folders(options.folder, options.worlds, options.seed) as sources:
        for source in sources:
            lines = (source / "questions.jsonl").read_text(encoding="utf-8").splitlines()
            asked = [question for question in map(json.loads, lines) if question["hops"] in options.hops]
            if not asked:
                continue
            with tempfile.TemporaryDirectory() as index, RagKV.create(index, dtype=options.dtype) as rag:
                rag.ingest(source / "corpus")
                for engine in options.engines:
                    found = accuracy(rag, asked[: options.limit], engine, top_k=options.top_k, **retrieval)
                    for hops, answers in found.items():
                        right[engine].setdefault(hops, []).extend(answers)
    rows = []
    for engine, by_hops in right.items():
        parts: dict[int | str, list[bool]] = dict(sorted(by_hops.items()))
        if len(parts) > 1:
            parts["all"] = [ok for oks in by_hops.values() for ok in oks]
        for hops, oks in parts.items():
            value = sum(oks) / len(oks)
            rows.append({"engine": engine, "hops": hops, "right": sum(oks), "n": len(oks), "value": value})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=HERE, help="holds corpus/ and questions.jsonl")
    parser.add_argument("--worlds", type=int, default=0, help="ask about this many fresh worlds instead")
    parser.add_argument("--seed", type=int, default=FIRST_SEED, help="seed of the first fresh world")
    parser.add_argument("--hops", type=int, nargs="+", default=[1, 2], help="ask only questions of this many hops")
    parser.add_argument("--limit", type=int, help="ask at most this many questions of each corpus")
    parser.add_argument("--engines", nargs="+", default=ENGINES)
    parser.add_argument("--retrieval", choices=MODES, help="the index's own, if not given: bm25")
    parser.add_argument("--rerank", action=argparse.BooleanOptionalAction, help="the index's own, if not given: no")
    parser.add_argument("--top-k", type=int, default=8, help="chunks that a question reads")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--json", action="store_true", help="print the options and a row per engine and hops")
    options = parser.parse_args(arguments)
    if not options.worlds and not (options.folder / "questions.jsonl").is_file():
        parser.error(f"{options.folder} has no questions.jsonl; examples/build_corpus.py --output FOLDER writes one")
    try:
        rows = measure(options)
    except RagkvError as error:
        parser.error(str(error))
    if not rows:
        parser.error("no question is left to ask; change --hops or --folder")
    if options.json:
        settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
        print(json.dumps({"options": settings, "rows": rows}))
        return
    for row in rows:
        hops = row["hops"] if row["hops"] == "all" else f"{row['hops']} hop"
        print(f"{row['engine']:6} {hops:6} {row['right']:3} of {row['n']:3} {row['value']:7.1%}")


if __name__ == "__main__":
    main()
