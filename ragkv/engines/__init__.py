"""Engines: methods that answer a question from the prefix, the chunks' KV with scores, and the question
(docs/engines.md).
"""

from ragkv.attention.kv import PlacedChunk
from ragkv.attention.sequence import TokenSequence
from ragkv.engines.base import (
    Argmax,
    ContextChunk,
    Demand,
    Engine,
    Forward,
    Join,
    ModelFacts,
    Operation,
    Program,
    Release,
    Request,
    Sample,
    Shared,
    WaitFor,
    answer_from,
    engine_class,
    engine_names,
    make_engine,
    require_supported,
    supported_engines,
    unsupported_reason,
)

__all__ = [
    "Argmax",
    "ContextChunk",
    "Demand",
    "Engine",
    "Forward",
    "Join",
    "ModelFacts",
    "Operation",
    "PlacedChunk",
    "Program",
    "Release",
    "Request",
    "Sample",
    "Shared",
    "TokenSequence",
    "WaitFor",
    "answer_from",
    "engine_class",
    "engine_names",
    "make_engine",
    "require_supported",
    "supported_engines",
    "unsupported_reason",
]
