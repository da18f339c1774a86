"""A real redis-server, and a TCP proxy before it that stalls or damages what it passes on."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest


class RedisServer:
    """A redis-server of its own, without files; `start` again after `kill` is a server without data."""

    def __init__(self, *options: str) -> None:
        if shutil.which("redis-server") is None:
            pytest.skip("needs redis-server: apt-get install redis-server")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._options = options
        self.start()

    def start(self) -> None:
        import redis

        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self.client = redis.Redis(port=self.port)
        while self._process.poll() is None:
            with suppress(redis.ConnectionError):
                self.client.ping()
                return
        raise AssertionError("redis-server did not start")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Proxy:
    """Passes on to a port of this machine. `flip`: change every so-manyth byte of the replies; `stalled`: pass on
    nothing."""

    def __init__(self, port: int) -> None:
        self._target, self.flip, self.stalled = port, 0, threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def close(self) -> None:
        self.stalled.clear()
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in self._open:
            each.close()

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._open.append(client)
                try:
                    server = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    client.shutdown(socket.SHUT_RDWR)
                    continue
                self._open.append(server)
                self._start(self._pass, client, server, False)
                self._start(self._pass, server, client, True)

    def _pass(self, source: socket.socket, target: socket.socket, replies: bool) -> None:
        seen = 0
        with suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                while self.stalled.is_set():
                    time.sleep(0.01)
                if replies and self.flip:
                    for at in range(-seen % self.flip, len(data), self.flip):
                        data[at] ^= 0x10
                seen += len(data)
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
