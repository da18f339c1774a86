"""Calls of the server's app behind its guard, without a socket."""

import json

import numpy as np
from live import PATIENT

from ragkv.retrievers import Embedding
from ragkv.server.middleware import Guard
from ragkv.server.settings import ServerLimits


def guarded(app, *, keys=None, hosts=None, responded=lambda *_: None, **limits):
    """`app` with the server's guard and these limits."""
    return Guard(app, keys=keys, hosts=hosts, limits=ServerLimits(**{**PATIENT, **limits}), responded=responded)


def post_scope(path, kind="application/json"):
    """The scope of an ASGI call: a POST of this content type."""
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "server": ("localhost", 80), "client": ("localhost", 1),
        "headers": [(b"host", b"localhost"), (b"content-type", kind.encode())],
    }  # fmt: skip


def posted(path, body, gone):
    """An ASGI call of `path` with this body, as JSON: scope, receive, send, and the list of sent messages. The client
    disconnects when `gone` is set.
    """
    requests, sent = iter([{"type": "http.request", "body": json.dumps(body).encode()}]), []

    async def receive():
        for message in requests:
            return message
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    return post_scope(path), receive, send, sent


def events(response):
    """Pairs of event name and data of a stream, without comments."""
    blocks = [block.split("\n") for block in response.text.split("\n\n") if block and not block.startswith(":")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


class Lengths:
    """An embedder and a reranker based on the length of a text."""

    modes = frozenset({"dense"})

    def embed_documents(self, texts):
        return Embedding(dense=np.array([[len(text), 1] for text in texts], dtype=np.float32))

    def embed_query(self, text):
        return self.embed_documents([text])

    def score(self, question, texts):
        return [float(len(text)) for text in texts]
