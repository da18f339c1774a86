"""The port that a server will listen on, reserved before it loads its models."""

from __future__ import annotations

import socket

from ragkv.errors import UsageError

__all__ = ["reserve"]


def reserve(host: str, port: int) -> socket.socket:
    """A socket that has this address, and takes no connections yet: until it listens, clients are refused.

    UsageError when the address cannot be had.
    """
    made = None
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier server may linger
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
    except (OSError, OverflowError, UnicodeError) as error:  # a host that is no name at all is a UnicodeError
        if made is not None:
            made.close()
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{host} port {port} cannot be listened on: {reason}.") from error
    return made
