"""LiteLLM, which treats the server as any OpenAI-compatible one."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it fetches prices from GitHub

import litellm
from asked import KEY, MESSAGES, MODEL, MOST, URL, notify

ASKED = {"model": f"openai/{MODEL}", "messages": MESSAGES, "max_tokens": MOST, "api_base": URL, "api_key": KEY}

whole = litellm.completion(**ASKED, num_retries=0)
chunks = list(litellm.completion(**ASKED, num_retries=0, stream=True, stream_options={"include_usage": True}))
footed = litellm.completion(**ASKED, num_retries=0, extra_body={"footer": True})
try:
    litellm.completion(**{**ASKED, "model": "openai/none"}, num_retries=0)
    refused = None
except litellm.exceptions.NotFoundError as error:
    refused = error.status_code
notify(
    text=whole.choices[0].message.content,
    streamed="".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
    annotations=[each["url_citation"]["url"] for each in whole.choices[0].message.annotations],
    sources=[each["chunk_id"] for each in whole.sources],
    footer=footed.choices[0].message.content,
    usage=chunks[-1].usage.completion_tokens,
    refused=refused,
    embedding=litellm.embedding(
        model=f"openai/{MODEL}", input=["Halden Works"], api_base=URL, api_key=KEY, encoding_format="float"
    ).data[0]["embedding"],
)
