"""The `ragkv` command, one file per subcommand, and how every command runs.

Errors are one sentence without a traceback, and exit codes 0, 1 and 2.
"""

from __future__ import annotations

import atexit
import errno
import functools
import gc
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import pairwise
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

import ragkv
from ragkv.cli.console import LogLine, echo, fail, guarded, note
from ragkv.cli.options import FLAGS, VARIABLES, Debug
from ragkv.errors import RagkvError, UsageError
from ragkv.util.files import FULL, shortened

_WrongUsage: type[Exception] = typer.BadParameter.__mro__[1]
"""click's UsageError. typer brings a click of its own or takes the installed one, and does not export the class."""

_NO_MEMORY = re.compile(
    "(can't|cannot) allocate memory|out of memory|can't start new thread|failed to map segment|"
    "could not create a primitive",
    re.IGNORECASE,
)
"""As torch, CUDA, oneDNN, Python, the dynamic linker and the system write it."""
_NAMED = frozenset(
    (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)
)
"""What the system refuses because of the path that it is given."""


@contextmanager
def _in_one_sentence() -> Iterator[None]:
    try:
        yield
    except _WrongUsage as error:
        raise _sentence(error) from error
    except KeyboardInterrupt:
        _note_interrupt()
        raise typer.Exit(130) from None


_AGAIN_SECONDS = 0.01


def _interrupt_again(event: sys.UnraisableHookArgs) -> None:
    """An interrupt may come within a destructor or another function that C calls. It cannot be raised there: Python
    prints it and goes on. So it is sent again, by a thread, because here it would be lost in the same way.
    """
    if not issubclass(event.exc_type, KeyboardInterrupt) or not hasattr(signal, "pthread_kill"):
        sys.__unraisablehook__(event)
        return
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(_AGAIN_SECONDS, signal.pthread_kill, (main, signal.SIGINT))
    timer.daemon = True
    timer.start()


def _note_interrupt() -> None:
    kept = "; what was committed is kept, and the same command continues from there."
    note(f"ragkv: interrupted{kept if _typed() in _COMMITTING else '.'}")


class CommandGroup(TyperGroup):
    """Reports wrong usage in one sentence, and notes after an interrupt that committed work is kept."""

    make_context = _in_one_sentence()(TyperGroup.make_context)
    invoke = _in_one_sentence()(TyperGroup.invoke)


class SingleCommand(TyperCommand):
    """The same for a program that is one command."""

    make_context = _in_one_sentence()(TyperCommand.make_context)
    invoke = _in_one_sentence()(TyperCommand.invoke)


def require_values(command: Any) -> Any:
    """Make a command, and those below it, refuse an option as the value of the option before it.

    The parser takes the next word whatever it is, so that `ingest docs --ray --index i` would read the folder `i`.
    A value that is spelled like an option is given as `--name=--json`.
    """
    for below in filter(None, getattr(command, "commands", {}).values()):
        require_values(below)
    taking = {flag for option in command.params if not getattr(option, "is_flag", True) for flag in option.opts}
    flags = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)} | {"--help"}

    def parse_args(ctx: Any, args: list[str]) -> Any:
        words = args[: args.index("--")] if "--" in args else args
        if "--vllm" in taking and ["--runtime", "vllm"] in ([*pair] for pair in pairwise(words[:-1])):
            at = words.index("vllm") + 1  # `--runtime vllm URL`, as of serve
            args = [*args[:at], "--vllm", *args[at:]]
        for word, value in pairwise(words):
            if word in taking and value in flags and word.startswith("-"):
                raise UsageError(f"Option '{word}' requires an argument; see {ctx.command_path} --help.")
        return type(command).parse_args(command, ctx, args)

    command.parse_args = parse_args
    return command


def _typed() -> str:
    """The name of the command on the command line; empty for none, or for another program's."""
    return next((word for word in sys.argv[1:] if word in _COMMANDS or f"{word}!" in _COMMANDS), "")


def _sentence(error: Any) -> Exception:
    """The parser's message with the command whose help to read; "no arguments" passes through and shows the help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return cast("Exception", error)
    # without a context, an option lacks its value
    command = f"ragkv {_typed()}".rstrip() if error.ctx is None else error.ctx.command_path
    line = " ".join(error.format_message().split())
    if type(error).__name__ == "MissingParameter" and getattr(error.param, "help", None):
        what = " ".join(error.param.help.split()).rstrip(".")
        line = f"{line.rstrip('.')} ({what[:1] if what[1:2].isupper() else what[:1].lower()}{what[1:]})"
    if command == "ragkv query" and line.startswith("Got unexpected extra argument"):
        line = 'The question is one argument: put it in quotes, as in ragkv query "Who …?"'
    return UsageError(
        f"{line} See {command} --help." if line.endswith("?") else f"{line.rstrip('.')}; see {command} --help."
    )


def log_to_stderr(*, debug: bool) -> None:
    """Write the log to stderr: warnings, or with `debug` everything."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogLine("%(name)s: %(message)s" if debug else "%(head)s: %(message)s"))
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, handlers=[handler], force=True)
    for chatty in ("httpx", "httpcore", "urllib3", "filelock", "bm25s"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def brief() -> None:
    """Collect cyclic garbage rarely, for a short-lived process.

    Imports create a million objects that stay alive, and scanning them repeatedly takes time.
    """
    gc.set_threshold(50_000, 20, 20)


def run(app: typer.Typer, name: str) -> None:
    """Run `app` on the words after the program's `name`.

    ragkv's own errors, broken pipes and what the system refuses (memory, a file, room on the disk) end without a
    traceback, unless `--debug` is given. `app` has that option.
    """
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    debug = "--debug" in arguments[:end]
    if debug:  # users may write it anywhere, but the parser only accepts it before the command's name
        arguments = ["--debug", *(word for word in arguments[:end] if word != "--debug"), *arguments[end:]]
    collecting = gc.get_threshold()
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)  # at exit, Python then does not search all imported objects for cycles
    # otherwise numba sets up colorama, if installed, which writes an escape sequence to a terminal at exit
    os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")
    # torch keeps kernels for the sizes of its last 1024 products, twice, in half a megabyte each: with passes of ever
    # new sizes, `ingest --watch` would take a gigabyte for them
    for capacity in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(capacity, "128")
    _open_streams()
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _interrupt_again
    with guarded():
        try:
            app(arguments, prog_name=name)
        except KeyboardInterrupt:  # while the commands were put together
            _note_interrupt()
            sys.exit(130)
        except RagkvError as error:
            if debug:
                raise
            fail(_with_variable(_as_typed(str(error), arguments), arguments))
            sys.exit(error.exit_code)
        except (BrokenPipeError, SystemExit) as end:
            if isinstance(end, SystemExit) and not isinstance(end.__context__, BrokenPipeError):
                raise
            _give_up_stdout()  # the reader has left (`| head`), for which typer and rich would exit with code 1
            sys.exit(0)
        except (ImportError, MemoryError, OSError, RuntimeError) as error:
            refused = None if debug else _refused(error)
            if refused is None:
                raise
            fail(refused)
            sys.exit(1)
        finally:
            gc.set_threshold(*collecting)


def _refused(error: Exception) -> str | None:
    """What the system refused, as one sentence; None for any other error."""
    if isinstance(error, OSError) and (error.errno in FULL | {errno.EIO} or (error.errno in _NAMED and error.filename)):
        if error.filename is not None:
            return f"{error.filename} cannot be used: {error.strerror}."
        _give_up_stdout()
        return f"The result cannot be written: {error.strerror}."
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return "Too many files are open: allow more of them (ulimit -n)."
    if isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)):
        return "Not enough memory: close other programs, or use a smaller top-k, batch or model."
    return None


def _as_typed(message: str, arguments: Sequence[str]) -> str:
    """An error of decoding with the names of the options that were given: "--top-p must be", not "decoding: top_p"."""
    match = re.match("decoding: (.+?)(?= must | cannot )", message)
    if match is None:
        return message
    flags = {word.partition("=")[0] for word in arguments}

    def flag(word: re.Match[str]) -> str:
        name = f"--{word[0].replace('_', '-')}"
        return name if name in flags else word[0]

    what = re.sub(r"\w+", flag, match[1])
    return message if what == match[1] else what + message[match.end() :]


def _with_variable(message: str, arguments: Sequence[str]) -> str:
    """The message with the variable whose value it refuses: nothing on the command line shows that value."""
    flags = {word.partition("=")[0] for word in arguments}
    for name, variable in VARIABLES.items():
        value = os.environ.get(variable, "")
        named = message.startswith((f"{name} ", f"{FLAGS[name]} ")) or any(
            repr(part) in message for part in {value, *value.split(",")} - {""}
        )
        if value and named and FLAGS[name] not in flags and variable not in message:
            return f"{message.rstrip('.')} ({variable} is {shortened(value)})."
    return message


def _open_streams() -> None:
    """Open /dev/null for a standard stream that was closed (`>&-`); otherwise the next opened file would get its
    number, and its output.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


def _give_up_stdout() -> None:
    """Discard what stdout could not write; otherwise Python would try again at exit, and print an error."""
    with suppress(OSError):  # stdout is not a file, or accepts the rest now
        sys.stdout.flush()
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


_PANELS = {
    "Ask your documents": "ingest! query! chat serve stop mcp",
    "Look after an index": "ls show! stats warm! delete! verify repair gc compact backup! pack! unpack! config",
    "Judge and tune": "plan! doctor tune! bench",
    "Models": "models! finetune",
}
"""The commands below each heading of the help; "!": without arguments, a command shows its help."""
_COMMITTING = frozenset({"warm", "delete", "repair", "gc"})
"""The commands that commit their work in small steps; `ingest` says itself what it has committed."""
_COMMANDS = {name: panel for panel, names in _PANELS.items() for name in names.split()}
_MODULES = {
    "tune": "doctor",
    "chat": "query",
    **dict.fromkeys(("ls", "show", "delete", "stats", "verify", "repair", "gc", "compact", "backup"), "maintenance"),
    **dict.fromkeys(("pack", "unpack", "warm"), "maintenance"),
    **dict.fromkeys(("stop", "mcp"), "serve"),
}
"""The modules of commands that are not named like their command."""


class _Root(CommandGroup):
    """Imports a command on demand: importing all of them takes a tenth of a second."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = dict.fromkeys(name.rstrip("!") for name in _COMMANDS)

    def list_commands(self, ctx: Any) -> list[str]:
        return [*self.commands]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _command(cmd_name) if cmd_name in self.commands else None


@functools.cache
def _command(name: str) -> Any:
    module = import_module(f"ragkv.cli.{_MODULES.get(name, name)}")
    helps = f"{name}!" in _COMMANDS
    panel = _COMMANDS[f"{name}!" if helps else name]
    alone = typer.Typer(rich_markup_mode="markdown", pretty_exceptions_enable=False)
    function = getattr(module, name, None) or module.app
    if isinstance(function, typer.Typer):
        alone.add_typer(function, name=name, rich_help_panel=panel)
    else:
        alone.command(name=name, no_args_is_help=helps, rich_help_panel=panel)(function)
    return require_values(typer.main.get_group(alone).commands[name])


app = typer.Typer(
    name="ragkv",
    cls=_Root,
    help="Ask your own documents: every chunk is prefilled once, at ingest, and answers start from its stored KV.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _version(show: bool) -> None:
    if show:
        echo(f"ragkv {ragkv.__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Debug = False,
    _: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    log_to_stderr(debug=debug)


def main() -> None:
    """Entry point of the `ragkv` command."""
    run(app, "ragkv")
