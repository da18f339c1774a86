"""A real redis-server, a TCP proxy that stalls or damages replies, and an S3 server with faults."""

import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class RedisServer:
    """A redis-server without files; `start` after `kill` gives a server without data."""

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
    """A proxy to a local port. `flip`: change one byte in this many of the replies; `stalled`: forward nothing."""

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


class S3Server(ThreadingHTTPServer):
    """The parts of S3 that obstore uses, over `objects` by path. `fault` selects the fault; `held` lets the requests of
    a hanging server end.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _S3)
        self.objects: dict[str, bytes] = {}
        self.fault = ""
        self.held = threading.Event()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self.held.set()
        self.shutdown()
        self._thread.join()
        self.server_close()


class _S3(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise the body waits 40 ms for the header's acknowledgement
    server: S3Server

    def do_GET(self) -> None:
        objects, fault = self.server.objects, self.server.fault
        if fault == "hangs":
            self.server.held.wait(600)
        body, name = self.rfile.read(int(self.headers.get("Content-Length", 0))), self.path.partition("?")[0]
        if fault == "resets":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self.connection.close()
            self.close_connection = True  # otherwise the handler waits for the next request
        elif fault.isdecimal():
            self.reply(int(fault), b"<Error><Code>Wrong</Code></Error>")
        elif self.command == "PUT":
            there = name in objects and self.headers.get("If-None-Match") == "*" and fault != "overwrites"
            if not there:
                objects[name] = body
            self.reply(412 if there else 200)
        elif self.command == "POST":  # a list of keys to delete
            keys = re.findall(r"<Key>(.*?)</Key>", body.decode())
            for key in keys:
                objects.pop(f"{name.rstrip('/')}/{key}", None)
            deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            self.reply(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())
        elif name not in objects:
            self.reply(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            value = objects[name]
            changed = {
                "shortened": value[:-1],
                "flips": value[:-9] + bytes([value[-9] ^ 1]) + value[-8:],
                "stale": next((other for key, other in objects.items() if key != name), value),  # valid
                "a page": b"<html>Sign in</html>",
            }
            self.reply(200, changed.get(fault, value), more=fault == "truncates")

    def reply(self, status: int, body: bytes = b"", *, more: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) + 10 * more))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Tue, 24 Nov 2026 00:00:00 GMT")
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(body)
        self.close_connection |= more

    def log_message(self, *_: object) -> None:
        """Suppress the log."""


for _method in ("do_PUT", "do_POST"):
    setattr(_S3, _method, _S3.do_GET)
