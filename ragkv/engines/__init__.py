"""Engines: each is a program that answers from prefix, chunk KVs with scores and question (docs/engines.md)."""

from ragkv.engines.ability import able_engines, refusal, require_able
from ragkv.engines.base import ContextChunk, Demand, Engine, ModelFacts, Request
from ragkv.engines.program import Ask, Choose, Greedy, Leave, Program, Read, Row, Segment, Shared, Until, answer_from
from ragkv.engines.registry import engine_class, engine_names, make_engine

__all__ = [
    "Ask",
    "Choose",
    "ContextChunk",
    "Demand",
    "Engine",
    "Greedy",
    "Leave",
    "ModelFacts",
    "Program",
    "Read",
    "Request",
    "Row",
    "Segment",
    "Shared",
    "Until",
    "able_engines",
    "answer_from",
    "engine_class",
    "engine_names",
    "make_engine",
    "refusal",
    "require_able",
]
