"""The query engine inside LlamaIndex's own compositions: the answers are the command's, the events are all there."""

from __future__ import annotations

import asyncio
import json

from fixedllm import FixedLLM
from llama_index.core.chat_engine import CondenseQuestionChatEngine
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import RouterQueryEngine, SubQuestionQueryEngine
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.selectors import LLMSingleSelector
from llama_index.core.tools import QueryEngineTool

from ragkv.integrations.llama_index import RagKVQueryEngine

ONE = [
    "QueryStartEvent",
    "RetrievalStartEvent",
    "RetrievalEndEvent",
    "SynthesizeStartEvent",
    "SynthesizeEndEvent",
    "QueryEndEvent",
]


def test_query_engine_tool(rag, command, told, questions):
    tool = QueryEngineTool.from_defaults(RagKVQueryEngine(rag, engine="block"), name="companies", description="Firms.")
    wanted = command(questions[0], "--engine", "block")
    output = tool.call(questions[0])
    assert output.content == wanted["answer"]
    assert [n.node_id for n in output.raw_output.source_nodes] == [s["chunk_id"] for s in wanted["sources"]]
    assert told.names() == ONE
    assert asyncio.run(tool.acall(input=questions[0])).content == wanted["answer"]
    assert told.names() == ONE * 2


def test_condense_question_chat_engine(rag, command, told, questions):
    llm = FixedLLM(says={"And what does it make?": questions[2]})
    first, second = (command(question, "--engine", "ape")["answer"] for question in (questions[1], questions[2]))
    memory = ChatMemoryBuffer.from_defaults(token_limit=4000)  # the default one leaves its SQLite connection open
    chat = CondenseQuestionChatEngine.from_defaults(RagKVQueryEngine(rag, engine="ape"), llm=llm, memory=memory)
    assert str(chat.chat(questions[1])) == first
    reply = chat.chat("And what does it make?")
    assert str(reply) == second
    assert reply.source_nodes[0].metadata["document"] == "halillex-robotics.md"
    assert told.among(*ONE) == ONE * 2
    assert told.events[len(ONE) :][-1].query.query_str == questions[2]

    streaming = RagKVQueryEngine(rag, engine="ape", streaming=True)
    chat = CondenseQuestionChatEngine.from_defaults(streaming, llm=llm, memory=memory)
    pieces = list(chat.stream_chat("And what does it make?").response_gen)
    assert "".join(pieces).strip() == second
    assert told.among(*ONE) == ONE * 3


def test_router_query_engine(rag, command, told, questions):
    llm = FixedLLM(says={"choices": json.dumps([{"choice": 2, "reason": "it is about firms"}])})
    tools = [
        QueryEngineTool.from_defaults(RagKVQueryEngine(rag, engine=engine), name=engine, description=engine)
        for engine in ("full", "pced")
    ]
    router = RouterQueryEngine(LLMSingleSelector.from_defaults(llm=llm), tools, llm=llm)
    response = router.query(questions[0])
    assert str(response) == command(questions[0], "--engine", "pced")["answer"]
    assert (response.metadata["engine"], response.metadata["selector_result"].ind) == ("pced", 1)
    assert told.among(*ONE) == ["QueryStartEvent", *ONE, "QueryEndEvent"]


def test_sub_question_query_engine(rag, command, told, questions):
    asked = [{"sub_question": question, "tool_name": "companies"} for question in questions[:2]]
    answers = [command(question, "--engine", "block")["answer"] for question in questions[:2]]
    llm = FixedLLM(says={"<Tools>": f"```json\n{json.dumps({'items': asked})}\n```", "Sub question": "Both are known."})
    tool = QueryEngineTool.from_defaults(RagKVQueryEngine(rag, engine="block"), name="companies", description="Firms.")
    engine = SubQuestionQueryEngine.from_defaults(
        [tool],
        llm=llm,
        question_gen=LLMQuestionGenerator.from_defaults(llm=llm),
        response_synthesizer=get_response_synthesizer(llm=llm),
        verbose=False,
        use_async=False,
    )
    for response in (engine.query("Compare them."), asyncio.run(engine.aquery("Compare them."))):
        assert str(response) == "Both are known."
        said = [n.text.partition("\nResponse: ")[2] for n in response.source_nodes[:2]]
        assert said == answers
        assert response.source_nodes[2].metadata["retrieval_score"] > 0
    names = told.among(*ONE)
    assert [names.count(name) for name in ONE] == [6, 4, 4, 6, 6, 6]  # its own synthesis is two of them
    assert names[: 2 * len(ONE) + 1] == ["QueryStartEvent", *ONE, *ONE]
