"""A server in a separate process that pauses where a test wants to kill it."""

import threading
from pathlib import Path

from clichild import forkserver
from live import Live

__all__ = ["ServeChild"]


class ServeChild:
    """`run_server` over the index in `folder`. With `commits`, ingests pause after this many commits, and answers after
    their second text. `stop_seconds` and `grace` are the server's.
    """

    def __init__(self, folder: Path, commits: int | None = None, *, stop_seconds: int = 20, grace: float = 600) -> None:
        context = forkserver()
        self._pipe, there = context.Pipe(duplex=False)
        self.process = context.Process(
            target=_serve, args=(there, str(folder), commits, stop_seconds, grace), daemon=True
        )
        self.process.start()
        there.close()
        self.live = Live(self.heard(), self.process.terminate)

    def heard(self):
        """Its next message: its address, then "held" when the ingest pauses."""
        return self._pipe.recv()

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.join()

    def stop(self) -> int:
        """Send SIGTERM; returns the exit code."""
        self.process.terminate()
        self.process.join()
        return self.process.exitcode


def _serve(there, folder, commits, stop_seconds, grace):
    import torch
    from heldmodel import call_at_third_piece

    from ragkv import RagKV
    from ragkv.ingest import ingester
    from ragkv.server import app
    from ragkv.server.schemas import ServedIndexes
    from ragkv.server.settings import ServerSettings

    torch.set_num_threads(1)
    if commits is not None:
        ingester.BATCH_TOKENS = 64  # one or two documents
        _hold(ingester.Ingester, "_commit", commits, lambda: there.send("held"))
        call_at_third_piece(lambda answer: threading.Event().wait())
    app.GRACE = grace
    app.run_server(
        ServedIndexes({"own": RagKV.open(folder, device="cpu")}),
        ServerSettings(port=0, stop_seconds=stop_seconds),
        there.send,
    )


def _hold(owner, name, calls, then):
    """After `calls` calls of this method, the next one never returns."""
    whole, left = getattr(owner, name), [calls]

    def counted(self, *arguments):
        if not left[0]:
            then()
            threading.Event().wait()
        left[0] -= 1
        return whole(self, *arguments)

    setattr(owner, name, counted)
