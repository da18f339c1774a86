"""Many questions at once: they share every step of the model and the KV that several of them need."""

import asyncio
import json
import os
from pathlib import Path

from ragkv import RagKV

LINES = (Path(__file__).parent / "questions.jsonl").read_text(encoding="utf-8").splitlines()
QUESTIONS = [json.loads(line)["question"] for line in LINES[:12]]


async def main(rag: RagKV) -> None:
    async for result in rag.aquery_each(QUESTIONS[:3]):
        print(f"  {result.question} {result.answer.text if result.answer else result.error}")


with RagKV.open(os.environ.get("RAGKV_INDEX", "example-index")) as rag:
    answers = rag.query_many(QUESTIONS, engine="block", top_k=4)  # in the order of the questions
    chunks = {source.chunk_id for answer in answers for source in answer.sources}
    read = sum(answer.kv.hits - answer.kv.memory_hits for answer in answers)
    print(f"{len(answers)} answers from {len(chunks)} chunks; KV read from the store {read} times")

    asked = [
        {"question": QUESTIONS[0], "max_new_tokens": 40},
        {"question": "Is there nothing?", "where": ["source=none*"]},  # this one fails alone
        {"question": QUESTIONS[1], "engine": "full", "top_k": 2},
    ]
    for result in rag.query_each(asked):  # as they finish
        print(f"question {result.number}: {result.answer.text if result.answer else result.error}")

    asyncio.run(main(rag))
