"""LlamaIndex' `OpenAILike`: chat, stream, structured answers, and an agent that calls a function."""

import asyncio

from asked import KEY, MODEL, MOST, QUESTION, URL, Founder, look, looked, notify
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike


async def ask_agent():
    agent = FunctionAgent(tools=[look], llm=caller, initial_tool_choice="look")
    return str(await agent.run(QUESTION))


settings = {"model": MODEL, "api_base": URL, "api_key": KEY, "max_tokens": MOST, "is_chat_model": True}
llm = OpenAILike(**settings, max_retries=0, temperature=0.0)
footed = OpenAILike(**settings, max_retries=0, additional_kwargs={"extra_body": {"footer": True}})
caller = OpenAILike(**settings | {"max_tokens": 60}, max_retries=0, is_function_calling_model=True)
messages = [ChatMessage(role="user", content=QUESTION)]

whole = llm.chat(messages)
pieces = list(llm.stream_chat(messages))
notify(
    structured=caller.as_structured_llm(Founder).complete(QUESTION).raw.place,
    agent=bool(asyncio.run(ask_agent())),
    looked=looked[:1],
    text=whole.message.content,
    streamed="".join(piece.delta or "" for piece in pieces),
    completed=llm.complete(QUESTION).text,
    annotations=[each.url_citation.url for each in whole.raw.choices[0].message.annotations],
    sources=[each["chunk_id"] for each in whole.raw.sources],
    footer=footed.chat(messages).message.content,
    usage=whole.raw.usage.completion_tokens,
)
