"""What each client's script is given, and how it tells what it saw: it runs under a Python that has no ragkv."""

import json
import sys
from typing import Literal

from pydantic import BaseModel

URL, KEY = sys.argv[1:3]
MODEL = "ragkv/two"
QUESTION = "Who founded Halden Works?"
MESSAGES = [{"role": "user", "content": QUESTION}]
MOST = 6
"""New tokens of every answer."""
looked: list[str] = []
"""The places that `look` was called for."""


class Founder(BaseModel):
    """Who founded it."""

    place: Literal["Varn"]


def look(place: Literal["Varn"]) -> str:
    """Look at a place."""
    looked.append(place)
    return f"Bolt Ltd is in {place}."


def notify(**seen):
    """The script's result, on a line of stdout."""
    print(json.dumps(seen))
