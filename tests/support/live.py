"""A server with a real socket, in a thread of the test's process."""

import socket
import threading
from contextlib import contextmanager, suppress
from queue import Queue
from urllib.parse import urlsplit

from ragkv.server import app
from ragkv.server.schemas import ServedIndexes
from ragkv.server.settings import ServerLimits, ServerSettings

CHAT = "/v1/chat/completions"
PATIENCE = 600.0
"""Seconds after which a test that waits for the server fails."""
PATIENT = dict.fromkeys(("head_seconds", "body_seconds", "upload_seconds", "unread_seconds"), PATIENCE)
"""Limits that no client of a test can exceed, however busy the machine is."""


class Live:
    """The server's address: `url` ends with /v1, `root` does not. `stop` has the effect of SIGTERM."""

    def __init__(self, root, stop):
        self.root = root
        self.stop = stop
        self.url = f"{root}/v1"
        self.address = (urlsplit(root).hostname, urlsplit(root).port)

    def connect(self):
        """A connection with a timeout that ends a hung test."""
        return socket.create_connection(self.address, timeout=PATIENCE)

    def send(self, data, *, half=False):
        """Send these bytes and return the complete response until the server closes; `half`: shut down the sending
        side.
        """
        with self.connect() as connection:
            with suppress(OSError):  # the server may respond and close before it has read everything
                connection.sendall(data)
                if half:
                    connection.shutdown(socket.SHUT_WR)
            return received(connection)


def received(connection):
    """Everything received until the other side closes or resets the connection."""
    found = bytearray()
    try:
        while data := connection.recv(1 << 16):
            found += data
    except ConnectionError:
        pass
    return bytes(found)


def get(path, headers=""):
    """The bytes of a GET request after which the server closes the connection."""
    return f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}\r\n".encode()


def post(body, headers="", *, length=True, kind="application/json", close=True):
    """The bytes of a chat request."""
    counted = f"content-length: {len(body)}\r\n" if length else ""
    end = "connection: close\r\n" if close else ""
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\n{counted}{end}{headers}\r\n"
    return head.encode() + body


@contextmanager
def live(indexes, **settings):
    """Serve these indexes, and close them at the end, as `ragkv serve` does."""
    made, result = [], Queue()
    settings = {"limits": ServerLimits(**PATIENT), **settings}

    class Stoppable(app.GracefulServer):
        def __init__(self, *given):
            super().__init__(*given)
            made.append(self)

    def serve():
        try:
            app.run_server(ServedIndexes(indexes), ServerSettings(port=0, **settings), result.put)
        except BaseException as error:
            result.put(error)
            raise

    original, app.GracefulServer = app.GracefulServer, Stoppable
    thread = threading.Thread(target=serve, name="live server")
    try:
        thread.start()
        root = result.get(timeout=PATIENCE)
    finally:
        app.GracefulServer = original
    if isinstance(root, BaseException):
        raise root
    try:
        yield Live(root, lambda: setattr(made[0], "should_exit", True))
    finally:
        made[0].should_exit = True
        thread.join(PATIENCE)
    assert not thread.is_alive(), "the server does not stop"
