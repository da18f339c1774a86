"""A process in a mount namespace in which it is root, or root without the power to ignore permissions.

Many containers allow no namespace, and some only one of the two kinds.
"""

import ctypes
import functools
import os
import shutil
import subprocess
from pathlib import Path

NEW_MOUNTS, NEW_USER, PRIVATE = 0x20000, 0x10000000, (1 << 14) | (1 << 18)  # linux/sched.h; MS_REC | MS_PRIVATE
CAPABILITIES = 0x20080522  # linux/capability.h, version 3
WRITE_ALL, READ_ALL = 1 << 1, 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


@functools.cache
def namespace() -> tuple[str, ...] | None:
    """The prefix of a command that may mount file systems; None if that is not allowed. Tested by mounting over /mnt in
    the namespace.
    """
    own, users = ("unshare", "--mount"), ("unshare", "--user", "--map-root-user", "--mount")
    if shutil.which("unshare") is None:
        return None
    for prefix in (users,) if os.getuid() else (own, users):
        mount = [*prefix, "mount", "-t", "tmpfs", "none", "/mnt"]
        if not subprocess.run(mount, capture_output=True, check=False).returncode:
            return prefix
    return None


def enter() -> None:
    """Let this single-threaded process mount file systems from now on; requires that `namespace` is not None."""
    user, group = os.getuid(), os.getgid()
    if user or _call("unshare", NEW_MOUNTS):
        if _call("unshare", NEW_MOUNTS | NEW_USER):
            raise OSError("no mount namespace")
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            Path("/proc/self", name).write_text(text)
    if _call("mount", b"none", b"/", None, PRIVATE, None):
        raise OSError("the mounts of the namespace are not its own")


def obey_permissions() -> None:
    """Make file permissions apply to this process even as root."""
    sets = (ctypes.c_uint32 * 6)()
    if _call("capget", (ctypes.c_uint32 * 2)(CAPABILITIES, 0), sets):
        raise OSError("capabilities cannot be read")
    for place in (0, 1):  # effective and permitted
        sets[place] &= ~(WRITE_ALL | READ_ALL)
    if _call("capset", (ctypes.c_uint32 * 2)(CAPABILITIES, 0), sets):
        raise OSError("capabilities cannot be given up")


def _call(name: str, *arguments: object) -> int:
    result: int = getattr(ctypes.CDLL(None), name)(*arguments)
    return result
