"""Several processes that answer together, each with a part of the KV: `torchrun … -m ragkv.distributed`."""

from ragkv.distributed.group import Group
from ragkv.distributed.hello import Hello
from ragkv.distributed.meeting import Meeting, meet
from ragkv.distributed.watch import Watch

__all__ = ["Group", "Hello", "Meeting", "Watch", "meet"]
