"""`ragkv serve` answers over HTTP, `ragkv stop` ends a running server, `ragkv mcp` serves tools for assistants.

`ragkv serve --background` starts a server that outlives the command, and waits until it answers.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragkv.cli.console import echo, note, print_json, print_json_line
from ragkv.cli.options import (
    DEFAULT_INDEX,
    BatchTokens,
    Device,
    Index,
    Json,
    MaxSequences,
    NoServer,
    Quiet,
    Threads,
    UserFile,
    given_values,
    user_file,
    without_server,
)
from ragkv.config import CONFIG_FILE, byte_count, load_config, one_of
from ragkv.errors import ConfigError, MissingExtraError, RagkvError, UsageError, install_hint
from ragkv.server.local import LocalClient, LocalSocket, UnservedError, is_listening, query_body, server_process
from ragkv.util.files import key_file, refusal

if TYPE_CHECKING:
    from ragkv.pipeline import RagKV
    from ragkv.server.settings import ServerSettings

_RAY = "On a Ray cluster"


def serve(
    index: Annotated[
        list[str] | None,
        typer.Option(help="An index to serve, DIR or NAME=DIR; repeat it for more. Clients name it as model."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but this machine's own needs --keys.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8080,
    keys: Annotated[
        Path | None, typer.Option(help="File of hashed keys; clients then have to send `Authorization: Bearer KEY`.")
    ] = None,
    new_key: Annotated[
        str | None, typer.Option(help="Make a key with this name, add its hash to --keys, print the key, and end.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="A web page's origin that may ask from the browser; repeat it for more.")
    ] = None,
    max_requests: Annotated[
        int, typer.Option(help="The most requests at a time; further ones get status 429.", min=1)
    ] = 64,
    max_upload: Annotated[
        str, typer.Option(help="The most bytes of files that are uploaded at a time.", metavar="BYTES")
    ] = "256MiB",
    read_only: Annotated[
        bool,
        typer.Option(
            "--read-only", help="Refuse uploads and deletions, and do not store the KV that questions encode."
        ),
    ] = False,
    stop_seconds: Annotated[
        int, typer.Option(help="Seconds that a stop waits for running answers; then they are cut short.", min=0)
    ] = 20,
    footer: Annotated[bool, typer.Option(help="End every answer with its sources, as Markdown.")] = False,
    log_format: Annotated[
        str, typer.Option(help="json: everything on stderr is one JSON object per line; text: requests alone are.")
    ] = "text",
    ray: Annotated[
        str | None,
        typer.Option(
            help="Answer on a Ray cluster, from files of `ragkv pack` as --index: its address, auto, or local.",
            metavar="ADDRESS",
            rich_help_panel=_RAY,
        ),
    ] = None,
    replicas: Annotated[
        str, typer.Option(help="How many replicas answer; 1-8: by load.", metavar="N|N-M", rich_help_panel=_RAY)
    ] = "1",
    tiers: Annotated[
        Path | None,
        typer.Option(help="A ragkv.toml, or an index, whose [[tiers]] the replicas use.", rich_help_panel=_RAY),
    ] = None,
    runtime: Annotated[
        tuple[str, str] | None,
        typer.Option(
            help="Answer by a vLLM server with RagKVConnector, which reads the stored chunks itself.",
            metavar="vllm URL",
        ),
    ] = None,
    background: Annotated[
        bool, typer.Option("--background", help="Start the server, wait until it is ready, and leave it running.")
    ] = False,
    idle_seconds: Annotated[
        int, typer.Option(help="Without an address, for the command line, until so long unused.", hidden=True, min=0)
    ] = 0,
    device: Device = None,
    threads: Threads = None,
    batch_tokens: BatchTokens = None,
    max_sequences: MaxSequences = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Answer over HTTP by OpenAI's chat protocol, so that programs which speak it can ask your documents.

    The models of `/v1/models` are the indexes: `ragkv/NAME` answers with the index's default engine, `ragkv/NAME:ape`
    with another. Questions that come at the same time are answered together. `ragkv query` and `chat` of these
    indexes use this server. Ctrl-C stops it; `ragkv stop` stops one in the background.

    With --ray, replicas on the nodes of a cluster answer from packs, in files or objects (s3://…) that all nodes reach.

    Example: `ragkv serve --index handbook --index papers=~/papers-index`

    Example: `ragkv serve --ray auto --index s3://bucket/handbook.ragkv --replicas 1-8 --tiers handbook`
    """
    from ragkv.server.settings import Keys, ServerLimits, ServerSettings, named_places
    from ragkv.util.telemetry import log_as_json

    one_of("--log-format", log_format, ("text", "json"))
    if log_format == "json" and not background:
        log_as_json(sys.stderr)
    if new_key is not None:
        _add_key(new_key, keys, as_json=as_json)
        return
    settings = ServerSettings(
        host=host,
        port=port,
        keys=None if keys is None else Keys.read(keys),
        origins=tuple(allow_origin or ()),
        requests=max_requests,
        limits=ServerLimits(upload_bytes=byte_count("--max-upload", max_upload)),
        stop_seconds=stop_seconds,
        footer=footer,
        resident=True,
        idle_seconds=idle_seconds,
    )
    # absolute, so that errors name it, and commands find it from any folder
    places = {
        name: place if "://" in place and ray is not None else str(Path(place).expanduser().absolute())
        for name, place in named_places(index or [str(DEFAULT_INDEX)]).items()
    }
    if runtime is not None:
        one_of("--runtime", runtime[0], ("vllm",))
    if ray is not None:
        if background or runtime is not None:
            raise UsageError(
                "--ray serves in the foreground, by its own replicas: leave --background and --runtime out."
            )
        try:
            from ragkv.server.ray import RayOptions, run_on_ray
        except ModuleNotFoundError as error:
            raise MissingExtraError(f"--ray needs {error.name}; {install_hint('ray', 'serve')}.") from error
        options = RayOptions(
            packs=places,
            replicas=replicas,
            tiers=None if tiers is None else str(tiers),
            host=host,
            keys=None if keys is None else str(keys),
            origins=settings.origins,
            requests=max_requests,
            stop_seconds=stop_seconds,
            footer=footer,
            device=device,
            batch_tokens=batch_tokens,
            max_sequences=max_sequences,
        )
        run_on_ray(ray, options, port=port, on_ready=lambda url: _ready(url, places, as_json=as_json, quiet=quiet))
        return
    folders = {name: Path(place) for name, place in places.items()}
    registry = None if idle_seconds else _made_file(next(iter(folders.values())))
    for folder in folders.values():
        load_config(folder)  # if the index does not exist, nothing heavy is imported
    if background:
        _start_in_background(next(iter(folders.values())), as_json=as_json, quiet=quiet)
        return
    limits = {"batch_tokens": batch_tokens, "max_sequences": max_sequences}
    opening = {"device": device, "readonly": read_only or None, "runtime": runtime, **limits}
    with _log_requests(quiet=quiet, as_json=log_format == "json"):
        _serve_here(folders, settings, opening, registry, as_json=as_json, quiet=quiet)


def _add_key(name: str, keys: Path | None, *, as_json: bool) -> None:
    from ragkv.server.settings import add_key

    if keys is None:
        raise UsageError("--new-key adds to a file: name it with --keys FILE.")
    key = add_key(keys, name)
    if as_json:
        print_json_line({"name": name, "key": key})
    else:
        echo(key)


def _made_file(first: Path) -> Path | None:
    """Where a server remembers the indexes that clients had it make beside its first one."""
    with suppress(RagkvError):
        return log_file(first).with_suffix(".json")
    return None


def _serve_here(
    folders: dict[str, Path],
    settings: ServerSettings,
    opening: Mapping[str, Any],
    registry: Path | None,
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    """Answer in this process until it is stopped, from the indexes in `folders`, opened with the options `opening`."""
    from ragkv.server.settings import limit_heaps, reserve
    from ragkv.util.telemetry import export_spans

    limit_heaps()
    listening = sockets = None
    if not settings.idle_seconds:
        listening = reserve(settings.host, settings.port)
        for folder in folders.values():
            _end_server(folder, idle=True)
    elif (sockets := _idle_sockets(folders)) is None:
        return
    try:
        from ragkv.server.app import run_server
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"ragkv serve needs {error.name}; {install_hint('serve')}.") from error
    from ragkv.server.schemas import ServedIndexes, made_indexes

    if registry is not None:
        folders |= {name: Path(folder) for name, folder in made_indexes(registry).items() if name not in folders}
    with ExitStack() as opened:
        if listening is not None:
            opened.enter_context(listening)
        opened.callback(export_spans())
        if settings.idle_seconds:
            with ThreadPoolExecutor(1, initializer=_make_way) as loader:
                indexes = loader.submit(_load, folders, opening, opened, quiet=quiet).result()
        else:  # in this thread, so that Ctrl-C need not wait for it
            indexes = _load(folders, opening, opened, quiet=quiet)
        watched = _watched(folders, read_only=bool(opening["readonly"] or settings.idle_seconds))
        if watched and not quiet:
            note(f"watching {', '.join(str(each) for _, each, _ in watched)}")

        def ready(url: str) -> None:
            _ready(url, indexes, as_json=as_json, quiet=quiet)
            if settings.idle_seconds:
                threading.Thread(target=_warm_up, args=list(indexes.values()), daemon=True).start()

        gc.collect()
        gc.freeze()  # to search all that is loaded by now for garbage takes 0.3 s, in which every answer waits
        run_server(
            ServedIndexes(indexes, registry),
            settings,
            ready,
            listening,
            watched,
            sockets,
        )


def _load(
    folders: Mapping[str, Path], opening: Mapping[str, Any], opened: ExitStack, *, quiet: bool
) -> dict[str, RagKV]:
    """The indexes, with their models loaded; `opened` closes them."""
    from ragkv.engines import make_engine
    from ragkv.pipeline import RagKV

    indexes: dict[str, RagKV] = {}
    for name, folder in folders.items():
        rag = opened.enter_context(RagKV.open(folder, **opening))
        for other in indexes.values():
            rag.index.share_model(other.index)
        indexes[name] = rag
        rag.index.require_same_model()
        try:
            make_engine(rag.config.default_engine, rag.config.tuning)
        except UsageError as error:
            raise ConfigError(f"{folder / CONFIG_FILE}: {error}") from error
        if not quiet:
            note(f"loading {rag.config.model} for {name}")
        rag.model  # noqa: B018 - loaded now, so that the first question need not wait
        if opening["runtime"] is not None:
            rag.prove_runtime()
    return indexes


def _warm_up(rag: RagKV) -> None:
    """Ask this process as a command does, so that the next question waits for no import, search index or KV."""
    with suppress(RagkvError, UnservedError, OSError):
        for question in rag.sample_questions(1):
            _ = LocalClient(rag.folder).query(query_body(question, {"max_new_tokens": 2}), lambda _: None).answer


def _make_way() -> None:
    """Give this thread a low priority; on Linux, the others of the process keep theirs."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, 0, 5)


def _idle_sockets(folders: Mapping[str, Path]) -> dict[str, LocalSocket] | None:
    """The socket of the index, which is held while its model is loaded: this takes the place of a process that an
    earlier question left behind, with other settings. None if there is another server, or one that is loading, or the
    index cannot be written.
    """
    [(name, folder)] = folders.items()
    if server_process(folder) is None or is_listening(folder):
        _end_server(folder, idle=True)
        with suppress(OSError):
            return {name: LocalSocket.make(folder)}
    return None


def _watched(folders: Mapping[str, Path], *, read_only: bool) -> list[tuple[str, Path, bool]]:
    """(index, folder, prune) of each `[[watch]]` of the user file whose index is being served."""
    names = {folder.resolve(): name for name, folder in folders.items()}
    mirrored = []
    for watched in UserFile.read(user_file()).watch:
        index, folder = Path(watched.index).expanduser(), Path(watched.folder).expanduser()
        if not (index.is_absolute() and folder.is_absolute()):
            raise ConfigError(f"{user_file()}: the paths of [[watch]] have to be absolute, or begin with ~.")
        if index.resolve() in names and not read_only:
            mirrored.append((names[index.resolve()], folder, watched.prune))
    return mirrored


def _start_in_background(first: Path, *, as_json: bool, quiet: bool) -> None:
    """Start the same command line in the background, with a log named after its first index."""
    words = [word for word in sys.argv[1:] if word not in ("--background", "--json")]
    server = start([*words, "--json"], log_file(first))
    if as_json:
        print_json_line(server)
        return
    echo(f"ragkv serves {', '.join(server['models'])} at {server['url']} (process {server['pid']})")
    if not quiet:
        own = server_process(first) == server["pid"]
        ends = f"ragkv stop --index {shlex.quote(str(first))}" if own else f"kill {server['pid']}"
        note(f"Its log is {server['log']}; {ends} ends it.")
        if not own:
            note("The commands do not use it: another server is up for the index, or its folder takes no socket.")


@contextmanager
def _log_requests(*, quiet: bool, as_json: bool) -> Iterator[None]:
    """In the block, log a line of JSON on stderr per request, unless `quiet`; with `as_json` the whole log has such a
    handler.
    """
    log = logging.getLogger("ragkv.server.middleware.requests")
    level, propagate = log.level, log.propagate
    log.setLevel(logging.WARNING if quiet else logging.INFO)
    handler = logging.NullHandler() if as_json else logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.propagate = as_json
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate


def _ready(url: str, names: Iterable[str], *, as_json: bool, quiet: bool) -> None:
    models = [f"ragkv/{name}" for name in names]
    payload = {"url": f"{url}/v1", "models": models}
    _announce(payload, f"ragkv serves {', '.join(models)} at {url}/v1", as_json=as_json, quiet=quiet)


def _announce(payload: Mapping[str, Any], sentence: str, *, as_json: bool, quiet: bool) -> None:
    if as_json:
        print_json_line(payload)
        return
    echo(sentence)
    if not quiet:
        note("Ctrl-C stops it.")


SLACK_SECONDS = 30.0
"""Seconds that stopping a server may take beyond its own limit."""


def stop(index: Index = DEFAULT_INDEX, as_json: Json = False, quiet: Quiet = False) -> None:
    """Stop the server of an index (ragkv serve, or what a question left behind); running answers may still finish.

    Example: `ragkv stop --index handbook`
    """
    about = _end_server(index)
    if as_json:
        print_json({"stopped": False} if about is None else {"stopped": True, **about})
    elif not quiet:
        done = about and f"stopped the server of {', '.join(about['indexes'])} (process {about['pid']})"
        echo(done or f"no server runs for {index}")


def _end_server(index: Path, *, idle: bool = False) -> dict[str, Any] | None:
    """Stop the index's server and wait until it has ended; returns its process and its indexes. None if there is none,
    or with `idle`, none that a question left behind.
    """
    try:
        about = LocalClient(index).stop(idle=idle)
    except UnservedError:
        pid = server_process(index)
        if pid is None or (idle and is_listening(index)):
            return None
        if is_listening(index):
            raise RagkvError(
                f"The server for the index at {index} (process {pid}) does not answer; end it with kill."
            ) from None
        with suppress(OSError):  # it has not begun to listen, or is about to end
            os.kill(pid, signal.SIGTERM)
        about = {"pid": pid, "indexes": [str(index.absolute())], "stop_seconds": 0}
    until = time.monotonic() + about["stop_seconds"] + SLACK_SECONDS
    while server_process(index) is not None:
        if time.monotonic() > until:
            raise RagkvError(f"The server (process {about['pid']}) was asked to stop but still runs; end it with kill.")
        time.sleep(0.05)
    return {"pid": about["pid"], "indexes": about["indexes"]}


IDLE_SECONDS = 300


def leave_server(index: Path, options: Mapping[str, Any]) -> bool:
    """Start a process that loads the index's model and answers its next questions, until it gets none for
    `IDLE_SECONDS`. `options` are those of `ragkv serve`. False if it cannot run here.
    """
    if not (find_spec("fastapi") and find_spec("uvicorn") and os.access(index, os.W_OK)):
        return False
    given = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words = ["serve", "--index", f"index={index.absolute()}", "--idle-seconds", str(IDLE_SECONDS), "--quiet", *given]
    with suppress(RagkvError):  # there is no place for its log
        server = _spawn(words, log_file(index), stdout=subprocess.DEVNULL)[0]
        server.returncode = 0  # it outlives this process, which need not wait for it
        return True
    return False


_PROGRAM = "from ragkv.cli.main import main; main()"


def start(arguments: Sequence[str], log: Path) -> dict[str, Any]:
    """Start `ragkv ARGUMENTS` in a new session with stderr appended to `log`, and wait for its line of JSON.

    Returns that object with `pid` and `log`. If the server ends before, its own error message is raised.
    """
    server, before = _spawn(arguments, log, stdout=subprocess.PIPE)
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
    except BaseException:  # do not leave an unknown server behind
        server.terminate()
        server.wait()
        raise
    if not line.endswith(b"\n"):
        raise _failure(server.wait(), log, before)
    return {**json.loads(line), "pid": server.pid, "log": str(log)}


def _spawn(arguments: Sequence[str], log: Path, *, stdout: int) -> tuple[subprocess.Popen[bytes], int]:
    """Run `ragkv ARGUMENTS` in a new session with stderr appended to `log`; also returns the log's size before."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RagkvError(f"The server's log {log} cannot be written: {refusal(error)}.") from error
    try:
        before = os.fstat(output).st_size
        server = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=output,
            start_new_session=True,  # Ctrl-C and closing the terminal do not reach it
        )
        return server, before
    finally:
        os.close(output)


def log_file(index: Path) -> Path:
    """The log file of an index's server: below `$XDG_STATE_HOME/ragkv`, else `~/.local/state/ragkv`."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(index.resolve())).strip("-.")[-100:]
    try:
        return key_file().parent / "serve" / f"{name}.log"
    except RuntimeError as error:
        raise RagkvError("There is no home for the server's log; name a folder for it in XDG_STATE_HOME.") from error


def _failure(code: int, log: Path, before: int) -> RagkvError:
    """The error for a server that failed to start: its own message, if the log has one."""
    with log.open("rb") as file:
        file.seek(before)
        output = file.read().decode(errors="replace")
    lines = [json.loads(line)["message"] if line.startswith('{"time"') else line for line in output.splitlines()]
    sentences = [line.removeprefix("ragkv: ") for line in lines if line.startswith("ragkv: ")]
    if sentences:
        return (UsageError if code == UsageError.exit_code else RagkvError)(sentences[-1])
    return RagkvError(f"The server ended with code {code} before it was ready; {log} says more.")


def mcp(
    index: Index = DEFAULT_INDEX,
    http: Annotated[
        bool, typer.Option("--http", help="Listen on --host and --port, instead of stdin and stdout.")
    ] = False,
    host: Annotated[
        str, typer.Option(help="Address of --http; any but this machine's own needs --keys.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of --http; 0 takes a free one.", min=0, max=65535)] = 8081,
    keys: Annotated[Path | None, typer.Option(help="File of hashed keys for --http; see `ragkv serve`.")] = None,
    device: Device = None,
    threads: Threads = None,
    no_server: NoServer = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Give assistants and editors the index as tools, by the Model Context Protocol: search, ask, show, list_documents.

    An assistant starts this command itself and talks to it over stdin and stdout. The tools only read. If a server
    runs for the index (`ragkv serve`), it does their work, so no model is loaded again.

    Example: `claude mcp add handbook -- ragkv mcp --index ~/handbook`
    """
    if http:
        from ragkv.server.settings import Keys, ServerSettings, reserve

        settings = ServerSettings(host=host, port=port, keys=None if keys is None else Keys.read(keys))
        listening = reserve(host, port)
    load_config(index)  # if the index does not exist, nothing heavy is imported
    try:
        from ragkv.server.mcp import make_tools

        if http:
            from ragkv.server.app import run_tools
    except ModuleNotFoundError as error:
        extras = ("mcp", "serve") if http else ("mcp",)
        raise MissingExtraError(f"ragkv mcp needs {error.name}; {install_hint(*extras)}.") from error
    from ragkv.pipeline import RagKV

    with RagKV.open(index, device=device) as rag:
        server = None if without_server(no_server) else LocalClient(index, given_values(device=device))
        if server is None or server_process(index) is None:
            rag.index.require_same_model()
        tools = make_tools(rag, index.resolve().name, server)
        if http:
            run_tools(
                tools,
                settings,
                lambda url: _announce(
                    {"url": f"{url}/mcp"}, f"the tools of {index} are at {url}/mcp", as_json=as_json, quiet=quiet
                ),
                listening,
            )
        else:
            tools.run()
