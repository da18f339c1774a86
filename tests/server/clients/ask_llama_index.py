"""LlamaIndex' `OpenAILike`, for chat and stream."""

from __future__ import annotations

from asked import KEY, MODEL, MOST, QUESTION, URL, notify
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

settings = {"model": MODEL, "api_base": URL, "api_key": KEY, "max_tokens": MOST, "is_chat_model": True}
llm = OpenAILike(**settings, max_retries=0, temperature=0.0)
footed = OpenAILike(**settings, max_retries=0, additional_kwargs={"extra_body": {"footer": True}})
messages = [ChatMessage(role="user", content=QUESTION)]

whole = llm.chat(messages)
pieces = list(llm.stream_chat(messages))
notify(
    text=whole.message.content,
    streamed="".join(piece.delta or "" for piece in pieces),
    completed=llm.complete(QUESTION).text,
    annotations=[each.url_citation.url for each in whole.raw.choices[0].message.annotations],
    sources=[each["chunk_id"] for each in whole.raw.sources],
    footer=footed.chat(messages).message.content,
    usage=whole.raw.usage.completion_tokens,
)
