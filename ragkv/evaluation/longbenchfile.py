"""Read LongBench v1's JSONL files (`hotpotqa.jsonl`, `hotpotqa_e.jsonl`): long texts with questions of one data set.

The metrics, answer lengths and marks are those of THUDM/LongBench `LongBench/eval.py` (dataset2metric),
`config/dataset2maxlen.json` and `config/dataset2prompt.json`. Instructions are shortened, and the text comes first, as
in every prompt of ragkv. Texts are not truncated: LongBench cuts out the middle for models with a short context, but
here chunks can be retrieved instead. The kind of a LongBench-E example is its class of length.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from ragkv.errors import ConfigError
from ragkv.evaluation.cutting import Cutter
from ragkv.evaluation.example import Example
from ragkv.evaluation.filerow import Row
from ragkv.evaluation.longbenchscore import paragraph_number
from ragkv.evaluation.taskfile import Reading, TaskFile

__all__ = ["LONGBENCH", "DataSet", "longbench_file"]

_PASSAGE = re.compile(r"^Passage \d+:", re.MULTILINE)
_PARAGRAPH = re.compile(r"^(?:Paragraph \d+:|段落\d+[:：])", re.MULTILINE)
_BRIEF = "{input}\nGive only the answer."


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """How the questions of a data set are asked and judged. `metric` is None if ragkv does not have it.

    `mark` begins a passage, or with `shots` a worked example. `code` is cut at lines.
    """

    metric: str | None
    tokens: int
    ask: str
    mark: re.Pattern[str] | None = None
    shots: bool = False
    code: bool = False

    def chunks(self, text: str, cutter: Cutter) -> tuple[str, ...]:
        if self.code:
            return cutter.code(text)
        if self.mark is None:
            return cutter.prose(text)
        return (cutter.examples if self.shots else cutter.passages)(text, self.mark)


LONGBENCH = {
    "narrativeqa": DataSet(metric="qa_f1", tokens=128, ask="{input}\nAnswer with a single phrase if possible."),
    "qasper": DataSet(
        metric="qa_f1",
        tokens=128,
        ask='{input}\nAnswer with a phrase or a sentence; a yes/no question with "yes" or "no"; '
        'write "unanswerable" if the article does not tell.',
    ),
    "multifieldqa_en": DataSet(metric="qa_f1", tokens=64, ask=_BRIEF),
    "multifieldqa_zh": DataSet(metric=None, tokens=64, ask="{input}\n只告诉我答案。"),
    "hotpotqa": DataSet(metric="qa_f1", tokens=32, ask=_BRIEF, mark=_PASSAGE),
    "2wikimqa": DataSet(metric="qa_f1", tokens=32, ask=_BRIEF, mark=_PASSAGE),
    "musique": DataSet(metric="qa_f1", tokens=32, ask=_BRIEF, mark=_PASSAGE),
    "dureader": DataSet(metric=None, tokens=128, ask="{input}", mark=re.compile(r"^文章\d+", re.MULTILINE)),
    "gov_report": DataSet(metric="rouge_l", tokens=512, ask="{input}\nWrite a one-page summary of the report."),
    "qmsum": DataSet(metric="rouge_l", tokens=512, ask="{input}\nAnswer in one or more sentences."),
    "multi_news": DataSet(
        metric="rouge_l", tokens=512, ask="{input}\nWrite a one-page summary of all the news.", mark=_PASSAGE
    ),
    "vcsum": DataSet(metric=None, tokens=512, ask="{input}\n写一段总结，总结会议的内容。"),
    "trec": DataSet(
        metric="classification",
        tokens=64,
        ask="Determine the type of the question, as in the examples.\n\n{input}",
        mark=re.compile(r"^Question:", re.MULTILINE),
        shots=True,
    ),
    "triviaqa": DataSet(
        metric="qa_f1_first_line",
        tokens=32,
        ask="Answer the question, as in the examples, and give only the answer.\n\n{input}",
        mark=re.compile(r"^Passage:", re.MULTILINE),
        shots=True,
    ),
    "samsum": DataSet(
        metric="rouge_l_first_line",
        tokens=128,
        ask="Summarize the dialogue into a few short sentences, as in the examples.\n\n{input}",
        mark=re.compile(r"^Dialogue:", re.MULTILINE),
        shots=True,
    ),
    "lsht": DataSet(
        metric="classification",
        tokens=64,
        ask="判断给定新闻的类别，如例子所示。\n\n{input}",
        mark=re.compile(r"^新闻内容[:：]", re.MULTILINE),
        shots=True,
    ),
    "passage_count": DataSet(
        metric="count",
        tokens=32,
        ask="{input}\nHow many different paragraphs are there, without their repetitions? Give only the number.",
        mark=_PARAGRAPH,
    ),
    "passage_retrieval_en": DataSet(
        metric="retrieval",
        tokens=32,
        ask='{input}\n\nWhich paragraph is this the abstract of? Answer as "Paragraph 1", "Paragraph 2", etc.',
        mark=_PARAGRAPH,
    ),
    "passage_retrieval_zh": DataSet(
        metric="retrieval",
        tokens=32,
        ask="{input}\n\n以上摘要出自哪一段？按“段落1”、“段落2”等格式回答。",
        mark=_PARAGRAPH,
    ),
    "lcc": DataSet(metric="code_sim", tokens=64, ask="{input}\nWrite the next line of the code.", code=True),
    "repobench-p": DataSet(metric="code_sim", tokens=64, ask="{input}\nWrite the next line of the code.", code=True),
}


def longbench_file(path: Path, found: Iterator[Row], reading: Reading) -> TaskFile:
    """Read a file. Its data set is the "dataset" of its first line, or else the file's name."""
    first = next(found)
    named = first.text("dataset", default="") or path.stem
    data_set = LONGBENCH.get(named.removesuffix("_e"))
    if data_set is None:
        raise ConfigError(
            f"{first.where}: {named!r} is no data set of LongBench v1; these are: {', '.join(LONGBENCH)}."
        )
    by_length = path.stem.endswith("_e") or named.endswith("_e")

    def example(ordinal: int, row: Row) -> Example:
        answers = row.texts("answers", blank=True)
        if data_set.metric == "retrieval":
            for answer in answers:
                if paragraph_number(answer) is None:
                    raise ConfigError(f'{row.where}: an answer must be as "Paragraph 7", not {answer!r}.')
        classes = row.texts("all_classes") if data_set.metric == "classification" else ()
        chunks = data_set.chunks(row.text("context"), reading.cutter)
        return Example(
            example_id=row.name("_id"),
            question=data_set.ask.replace("{input}", row.text("input", default="")).strip(),
            chunks=chunks,
            answers=answers,
            kind=_length_class(row) if by_length else "",
            needed=_gold_paragraphs(chunks, answers) if data_set.metric == "retrieval" else (),
            classes=classes,
        )

    name = f"{named.removesuffix('_e')}{'_e' if by_length else ''}"
    return TaskFile(
        name=f"longbench/{name}",
        metric=data_set.metric,
        rows=chain([first], found),
        example=example,
        max_new_tokens=data_set.tokens,
    )


def _gold_paragraphs(chunks: tuple[str, ...], answers: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(i for i, chunk in enumerate(chunks) if chunk.split(":")[0].split("：")[0] in answers)


def _length_class(row: Row) -> str:
    """The class of length as in LongBench-E's scorer, by the file's own count of words."""
    length = row.values.get("length")
    if not isinstance(length, int) or isinstance(length, bool):
        raise ConfigError(f'{row.where}: "length" must be a whole number in a LongBench-E file.')
    return "0-4k" if length < 4000 else "4-8k" if length < 8000 else "8k+"
