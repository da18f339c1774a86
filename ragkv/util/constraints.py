"""Compile JSON schemas, regexes and grammars that other people wrote, without harm to this process.

llguidance recurses over references, so a chain of `$defs` or rules overflows the native stack, and a few hundred
characters of regex can need minutes and gigabytes. So each constraint is first compiled in a process of its own, under
limits of stack, memory and processor time: a kept child of this process, which has llguidance loaded, forks for it.
What passes there is compiled again here, for the model's vocabulary, with the same `matcher_limits`.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

MAX_CONSTRAINT_CHARS = 1 << 20
MAX_COMPILE_BYTES = 512 << 20
MAX_COMPILE_SECONDS = 4
"""Of processor time, so a busy machine refuses nothing."""
_STACK_BYTES = 2 << 20
"""A quarter of what threads have here."""
JSON_LAYOUT = {"lenient": False, "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line, as `json.dumps` writes it: a model that may write any white space may never stop."""
_PROGRAM = "from ragkv.util.constraints import compile_requests; compile_requests()"
_MAX_IDLE = 2
_MIN_COMPILED_BYTES = 8 << 20
"""With the states that answers add to it."""

K = TypeVar("K")
V = TypeVar("V")


class Constraint(NamedTuple):
    """llguidance's grammar, and about how many bytes its compiled form takes."""

    grammar: str
    num_bytes: int


class ByteBudgetCache(Generic[K, V]):
    """The values that were used last, of at most `budget` bytes together. Hold a lock around it if threads share it."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._total = 0
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def pop(self, key: K) -> V | None:
        """Remove a value; None if it is not there."""
        value, num_bytes = self._entries.pop(key, (None, 0))
        self._total -= num_bytes
        return value

    def put(self, key: K, value: V, num_bytes: int) -> None:
        """Add a value, unless it is larger than the budget, and remove those that no longer fit."""
        self.pop(key)
        if num_bytes > self._budget:
            return
        self._entries[key] = value, num_bytes
        self._total += num_bytes
        while self._total > self._budget:
            self.pop(next(iter(self._entries)))


_compiled: ByteBudgetCache[tuple[str, str], Constraint] = ByteBudgetCache(16 << 20)
_lock = threading.Lock()
_idle: dict[int, list[subprocess.Popen[bytes]]] = {}
"""Children that wait for a constraint, by the process that started them: a forked one starts its own."""


def matcher_limits() -> Any:
    """llguidance's own limits; they bound a compiled constraint to about 100 MB."""
    from llguidance import LLParserLimits

    return LLParserLimits(initial_lexer_fuel=400_000, max_lexer_states=50_000)


def compile_constraint(kind: str, text: str) -> Constraint:
    """The constraint of a JSON "schema", a "regex" or a Lark "grammar"; ValueError, with the reason, if it cannot be
    used.
    """
    with _lock:
        known = _compiled.pop((kind, text))
        if known is not None:
            _compiled.put((kind, text), known, 4 * len(text) + len(known.grammar))
            return known
    if len(text) > MAX_CONSTRAINT_CHARS:
        raise ValueError(f"it has {len(text):,} characters, and {MAX_CONSTRAINT_CHARS:,} are the most")
    reply = _ask(json.dumps([kind, text]).encode() + b"\n")
    if "error" in reply:
        raise ValueError(reply["error"])
    constraint = Constraint(**reply)
    with _lock:
        _compiled.put((kind, text), constraint, 4 * len(text) + len(constraint.grammar))
    return constraint


def _ask(request: bytes) -> dict[str, Any]:
    idle = _idle.setdefault(os.getpid(), [])
    for _ in range(_MAX_IDLE + 1):  # an idle child may have been killed meanwhile
        try:
            child = idle.pop()
        except IndexError:
            child = _start()
        assert child.stdin is not None
        assert child.stdout is not None
        line = b""
        try:
            with suppress(BrokenPipeError):
                child.stdin.write(request)
                child.stdin.flush()
                line = child.stdout.readline()
        finally:
            if not line.endswith(b"\n"):  # it died, or the user interrupted this
                child.kill()
                _close(child)
        if line.endswith(b"\n"):
            if len(idle) < _MAX_IDLE:
                idle.append(child)
            else:
                _close(child)
            reply: dict[str, Any] = json.loads(line)
            return reply
    raise ValueError("the process that compiles it was killed")


def _start() -> subprocess.Popen[bytes]:
    command, pipe = [sys.executable, "-P", "-c", _PROGRAM], subprocess.PIPE
    # in a session of its own, Ctrl-C does not reach it
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True)


def _close(child: subprocess.Popen[bytes]) -> None:
    with suppress(BrokenPipeError):
        child.communicate()


def _begin_again() -> None:
    """In a forked child, whose other threads are gone: one of them may have held the lock."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_begin_again)


@atexit.register
def _close_idle() -> None:
    for child in _idle.pop(os.getpid(), []):
        _close(child)


def compile_requests() -> None:
    """The program of the child: for each line of stdin, the JSON of `[kind, text]`, a line of JSON with the result."""
    import llguidance  # noqa: F401 - once, for all processes that are forked

    for line in sys.stdin.buffer:
        ours, theirs = os.pipe()
        if not (worker := os.fork()):
            os.close(ours)
            _compile_and_exit(line, theirs)
        os.close(theirs)
        with os.fdopen(ours, "rb") as pipe:
            written = pipe.read()
        _, status, usage = os.wait4(worker, 0)
        reply = {"error": _refusal(status)} if status else json.loads(written)
        if "grammar" in reply:
            growth = usage.ru_maxrss - resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            reply["num_bytes"] = max(_MIN_COMPILED_BYTES, growth * (1 if sys.platform == "darwin" else 1024))
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()


def _refusal(status: int) -> str:
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if number in (signal.SIGXCPU, signal.SIGKILL):
        return f"it takes more than {MAX_COMPILE_SECONDS} seconds to compile; make it simpler"
    if number in (signal.SIGSEGV, signal.SIGBUS):
        return "it is nested too deeply through its references; make it simpler"
    return f"it takes more than {MAX_COMPILE_BYTES >> 20} MB to compile; make it simpler"


def _compile_and_exit(line: bytes, output: int) -> None:
    """Write the reply to a request, and end the process; a limit that is exceeded ends it before."""
    try:
        limits = {"CPU": (MAX_COMPILE_SECONDS, MAX_COMPILE_SECONDS + 1), "CORE": (0, 0)}
        limits["AS"] = (MAX_COMPILE_BYTES, MAX_COMPILE_BYTES)
        for name, values in limits.items():
            with suppress(ValueError, OSError):  # macOS does not limit address space
                resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), values)
        reply: list[bytes] = []
        threading.stack_size(_STACK_BYTES)
        thread = threading.Thread(target=lambda: reply.append(_compile(*json.loads(line))))
        thread.start()
        thread.join()
        with os.fdopen(output, "wb") as pipe:
            pipe.write(reply[0])
        os._exit(0)
    finally:
        os._exit(1)


def _compile(kind: str, text: str) -> bytes:
    from llguidance import LLMatcher, LLTokenizer

    grammar = ""
    try:
        if kind == "schema":
            grammar = LLMatcher.grammar_from_json_schema(text, overrides=JSON_LAYOUT)  # type: ignore[arg-type]
        else:
            grammar = LLMatcher.grammar_from_regex(text) if kind == "regex" else LLMatcher.grammar_from_lark(text)
        limits = matcher_limits()
        wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits)
        if not wrong:
            matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=limits)
            matcher.compute_bitmask()
            wrong, messages = matcher.is_error(), [matcher.get_error().partition("\n")[0]]
    except (ValueError, RecursionError) as error:
        wrong, messages = True, [str(error)]
    if not wrong:
        return json.dumps({"grammar": grammar}).encode()
    lines = "\n".join(messages).splitlines()  # some of them only mark the position
    why = " ".join([*lines[:1], *(line[7:] for line in lines if line.startswith("error: "))]).removesuffix(".")
    return json.dumps({"error": why[:300]}).encode()
