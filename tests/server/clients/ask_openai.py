"""The `openai` package in the version that the other clients, which build on it, require."""

import openai
from asked import KEY, MESSAGES, MODEL, MOST, URL, notify

client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)
whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=MOST)
chunks = list(
    client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=MOST, stream=True, stream_options={"include_usage": True}
    )
)
last = next(chunk for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason)
notify(
    text=whole.choices[0].message.content,
    streamed="".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
    annotations=[each.url_citation.url for each in whole.choices[0].message.annotations],
    sources=[each["chunk_id"] for each in whole.sources],
    streamed_sources=[each["chunk_id"] for each in last.sources],
    usage=chunks[-1].usage.completion_tokens,
    models=[model.id for model in client.models.list()],
    embedding=client.embeddings.create(model=MODEL, input=["Halden Works"]).data[0].embedding,
)
