"""Arguments and output of the client scripts, which run in a Python without ragkv."""

import json
import sys
from typing import Literal

from pydantic import BaseModel

URL, KEY = sys.argv[1:3]
MODEL = "ragkv/two"
QUESTION = "Who founded Halden Works?"
MESSAGES = [{"role": "user", "content": QUESTION}]
MOST = 6
"""New tokens per answer."""
looked: list[str] = []
"""The places that `look` was called with."""


class Founder(BaseModel):
    """Who founded it."""

    place: Literal["Varn"]


def look(place: Literal["Varn"]) -> str:
    """Look at a place."""
    looked.append(place)
    return f"Bolt Ltd is in {place}."


def notify(**seen):
    """Print the script's result as a line."""
    print(json.dumps(seen))
