"""LangChain's `ChatOpenAI`: invoke, stream, usage, structured output, tools."""

from asked import KEY, MODEL, MOST, QUESTION, URL, Founder, look, notify
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

settings = {"model": MODEL, "base_url": URL, "api_key": KEY, "max_tokens": MOST, "max_retries": 0}
llm = ChatOpenAI(**settings, stream_usage=True)
footed = ChatOpenAI(**settings, extra_body={"footer": True})

longer = ChatOpenAI(**settings | {"max_tokens": 120})
methods = ("json_schema", "function_calling")
bound = longer.bind_tools([tool(look)], tool_choice="any", parallel_tool_calls=False)
asked = [HumanMessage(QUESTION)]
calling = bound.invoke(asked)
coming = list(bound.stream(asked))
called = coming[0]
for piece in coming[1:]:
    called += piece
results = [ToolMessage(tool(look).invoke(call).content, tool_call_id=call["id"]) for call in calling.tool_calls]

whole = llm.invoke(QUESTION)
pieces = list(llm.stream(QUESTION))
joined = pieces[0]
for piece in pieces[1:]:
    joined += piece
notify(
    structured=[longer.with_structured_output(Founder, method=each).invoke(QUESTION).place for each in methods],
    calls=[[(call["name"], call["args"]) for call in each.tool_calls] for each in (calling, called)],
    after=isinstance(
        longer.bind_tools([tool(look)], tool_choice="none").invoke([*asked, calling, *results]).content, str
    ),
    text=whole.content,
    streamed=joined.content,
    usage=whole.usage_metadata["output_tokens"],
    streamed_usage=joined.usage_metadata["output_tokens"],
    kept=sorted({**whole.additional_kwargs, **whole.response_metadata}),
    footer=footed.invoke(QUESTION).content,
)
