"""The server's app behind its guard."""

from __future__ import annotations

from ragkv.server.guard import Guard
from ragkv.server.setting import Limits


def guarded(app, *, keys=None, hosts=None, **limits):
    """`app` as it stands in the server; `limits` are those of the guard."""
    return Guard(app, keys=keys, hosts=hosts, limits=Limits(**limits))
