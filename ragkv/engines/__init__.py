"""Engines: each turns (prefix, chunk KVs with scores, question) into tokens (docs/engines.md)."""

from ragkv.engines.base import ContextChunk, Engine, Request, Stream
from ragkv.engines.decoding import Token, decode
from ragkv.engines.registry import engine_class, engine_names, make_engine

__all__ = [
    "ContextChunk",
    "Engine",
    "Request",
    "Stream",
    "Token",
    "decode",
    "engine_class",
    "engine_names",
    "make_engine",
]
