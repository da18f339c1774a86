"""The batch runtime: engines ask, it answers, the rows of all requests in one step (docs/design.md)."""

from ragkv.runtime.decoder import Generation, Token
from ragkv.runtime.job import Job
from ragkv.runtime.limit import Limits, limits_for
from ragkv.runtime.pool import Lease
from ragkv.runtime.runtime import Runtime, runtime_of
from ragkv.runtime.stream import Stream, TokenStream

__all__ = [
    "Generation",
    "Job",
    "Lease",
    "Limits",
    "Runtime",
    "Stream",
    "Token",
    "TokenStream",
    "limits_for",
    "runtime_of",
]
