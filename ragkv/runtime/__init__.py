"""The batch runtime: it runs the programs of all requests together, one forward pass per step (docs/design.md)."""

from ragkv.runtime.decoding import Generation, Token
from ragkv.runtime.kv_pool import Lease
from ragkv.runtime.runtime import Runtime, RuntimeLimits, Stream, TokenStream, limits_for, runtime_of
from ragkv.runtime.step import Job

__all__ = [
    "Generation",
    "Job",
    "Lease",
    "Runtime",
    "RuntimeLimits",
    "Stream",
    "Token",
    "TokenStream",
    "limits_for",
    "runtime_of",
]
