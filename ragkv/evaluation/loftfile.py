"""Read folders of LOFT's RAG tasks: questions with gold texts over a corpus.

A LOFT prompt holds the whole corpus (32k, 128k or 1M tokens). Here a question has its gold passages and a sample of the
others in random order, drawn by the seed, so that any model can be asked. The metrics are those in the table of data
sets in google-deepmind/loft's README ("multi_value_rag" is `loft_multi`).
"""

from __future__ import annotations

import random
from pathlib import Path

from ragkv.errors import ConfigError
from ragkv.evaluation.benchmark import graded, loft_name, loft_queries, passages_of
from ragkv.evaluation.example import Example
from ragkv.evaluation.filerow import Row, rows
from ragkv.evaluation.taskfile import Reading, TaskFile

__all__ = ["LOFT_METRICS", "loft_file"]

LOFT_METRICS = {
    "nq": "subspan_em",
    "topiocqa": "subspan_em",
    "hotpotqa": "subspan_em",
    "musique": "subspan_em",
    "qampari": "loft_multi",
    "quest": "loft_multi",
    "romqa": "loft_multi",
}
"""By data set; others use `subspan_em`."""

_TOKENS = {"subspan_em": 64, "loft_multi": 256}
_WHAT = "the folder of a LOFT RAG task"


def loft_file(folder: Path, reading: Reading) -> TaskFile:
    """`corpus.jsonl` and `SPLIT_queries.jsonl`; the split is "test", or "dev" where there is none."""
    passages = passages_of(folder / "corpus.jsonl", "pid", "title_text", "passage_text")
    texts = {passage.passage_id: passage.text for passage in passages}
    ids = list(texts)

    def example(ordinal: int, row: Row) -> Example:
        query = row.name("qid")
        answers = _answers(row)
        relevant = [passage for passage, grade in graded(row).items() if grade > 0]
        for passage in relevant:
            if passage not in texts:
                raise ConfigError(
                    f'{row.where}: "metadata.qrels" names the passage {passage!r}, which corpus.jsonl does not have.'
                )
        if not relevant:
            raise ConfigError(f'{row.where}: "metadata.qrels" names no passage with a score above 0.')
        # The seed includes the question's id, so the draw does not depend on which other questions are asked.
        rng = random.Random(f"{reading.seed}/{query}")
        wanted = min(max(reading.chunks, len(relevant)), len(ids))
        gold = set(relevant)
        drawn = rng.sample(ids, wanted)  # at least wanted - len(gold) of these are not gold
        chosen = relevant + [passage for passage in drawn if passage not in gold][: wanted - len(relevant)]
        rng.shuffle(chosen)
        return Example(
            example_id=query,
            question=row.text("query_text").strip(),
            chunks=tuple(texts[passage] for passage in chosen),
            answers=answers,
            needed=tuple(i for i, passage in enumerate(chosen) if passage in gold),
        )

    name = loft_name(folder)
    metric = next((LOFT_METRICS[part] for part in reversed(name.split("/")) if part in LOFT_METRICS), "subspan_em")
    return TaskFile(
        name=f"loft/{name}",
        metric=metric,
        rows=rows(loft_queries(folder, reading.split), _WHAT),
        example=example,
        max_new_tokens=_TOKENS[metric],
        seeded=True,
    )


def _answers(row: Row) -> tuple[str, ...]:
    value = row.values.get("answers")
    if isinstance(value, list) and any(isinstance(item, list) for item in value):
        raise ConfigError(
            f'{row.where}: "answers" holds lists, as LOFT\'s retrieval and conversation tasks do; '
            "give a RAG task of one turn, or measure retrieval with `ragkv eval retrieval`."
        )
    return row.texts("answers")
