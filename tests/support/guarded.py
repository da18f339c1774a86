"""The server's app behind its guard."""

from __future__ import annotations

from ragkv.server.middleware import Guard
from ragkv.server.settings import ServerLimits


def guarded(app, *, keys=None, hosts=None, responded=lambda *_: None, **limits):
    """`app` as it stands in the server; `limits` are those of the guard."""
    return Guard(app, keys=keys, hosts=hosts, limits=ServerLimits(**limits), responded=responded)
