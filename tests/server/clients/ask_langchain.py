"""LangChain's `ChatOpenAI`: invoke, stream, usage."""

from __future__ import annotations

from asked import KEY, MODEL, MOST, QUESTION, URL, notify
from langchain_openai import ChatOpenAI

settings = {"model": MODEL, "base_url": URL, "api_key": KEY, "max_tokens": MOST, "max_retries": 0}
llm = ChatOpenAI(**settings, stream_usage=True)
footed = ChatOpenAI(**settings, extra_body={"footer": True})

whole = llm.invoke(QUESTION)
pieces = list(llm.stream(QUESTION))
joined = pieces[0]
for piece in pieces[1:]:
    joined += piece
notify(
    text=whole.content,
    streamed=joined.content,
    usage=whole.usage_metadata["output_tokens"],
    streamed_usage=joined.usage_metadata["output_tokens"],
    kept=sorted({**whole.additional_kwargs, **whole.response_metadata}),
    footer=footed.invoke(QUESTION).content,
)
