"""Several questions at once on one event loop, which stays free: the model runs in threads."""

import asyncio
import os

from ragkv import RagKV

QUESTIONS = ["Who started Pelophor Press?", "How many people work at Linodyne Paper?"]


async def main() -> None:
    with RagKV.open(os.environ.get("RAGKV_INDEX", "example-index")) as rag:
        answers = await asyncio.gather(*(rag.aquery(question, top_k=4) for question in QUESTIONS))
        for answer in answers:
            print(answer.text)

        async for piece in rag.astream(QUESTIONS[0]):
            print(piece, end="", flush=True)
        print()

        task = asyncio.create_task(rag.aquery(QUESTIONS[1]))
        await asyncio.sleep(0)
        task.cancel()  # ends the answer at its next token
        print(await asyncio.gather(task, return_exceptions=True))


asyncio.run(main())
