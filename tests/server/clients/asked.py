"""What each client's script is given, and how it tells what it saw: it runs under a Python that has no ragkv."""

from __future__ import annotations

import json
import sys

URL, KEY = sys.argv[1:3]
MODEL = "ragkv/two"
QUESTION = "Who founded Halden Works?"
MESSAGES = [{"role": "user", "content": QUESTION}]
MOST = 6
"""New tokens of every answer."""


def notify(**seen):
    """The script's result, on a line of stdout."""
    print(json.dumps(seen))
