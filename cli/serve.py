"""`ragkv serve`: answer over HTTP, by OpenAI's protocol."""

from __future__ import annotations

import logging
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from ragkv.cli.console import note, print_json_line, say
from ragkv.cli.option import DEFAULT_INDEX, BatchTokens, Device, Json, MaxRows, Quiet
from ragkv.config import byte_count, load_config
from ragkv.errors import MissingExtraError, UsageError

__all__ = ["serve"]


def serve(
    index: Annotated[
        list[str] | None,
        typer.Option(
            "--index", help="An index to serve, DIR or NAME=DIR; repeat it for more. Clients name it as model."
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than this machine's need --keys.")
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
        int, typer.Option(help="Requests that are under way at a time; more are told to come again (429).", min=1)
    ] = 64,
    max_upload: Annotated[
        str, typer.Option(help="The most bytes of files that are uploaded at a time.", metavar="BYTES")
    ] = "256MiB",
    read_only: Annotated[
        bool,
        typer.Option(
            "--read-only", help="Take and delete no documents; KV that questions have to make is not kept either."
        ),
    ] = False,
    stop_seconds: Annotated[
        int, typer.Option(help="Seconds that a stop waits for answers on their way; then they are cut short.", min=0)
    ] = 20,
    footer: Annotated[bool, typer.Option(help="End every answer with its sources, as Markdown.")] = False,
    background: Annotated[
        bool, typer.Option("--background", help="Start the server, wait until it is ready, and leave it running.")
    ] = False,
    device: Device = None,
    batch_tokens: BatchTokens = None,
    max_rows: MaxRows = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Answer over HTTP by OpenAI's chat protocol, so that programs which speak it can ask your documents.

    The models of `/v1/models` are the indexes: `ragkv/NAME` answers with the index's default engine, `ragkv/NAME:ape`
    with another. Questions that come at the same time are answered together. `ragkv query`, `chat` and `ls` of these
    indexes have this server do their work. Ctrl-C stops it, and `ragkv stop` one in the background.

    Example: `ragkv serve --index handbook --index papers=~/papers-index`
    """
    from ragkv.server.key import Keys, add_key
    from ragkv.server.setting import Limits, ServerSettings, named_folders

    if new_key is not None:
        if keys is None:
            raise UsageError("--new-key adds to a file: name it with --keys FILE.")
        key = add_key(keys, new_key)
        if as_json:
            print_json_line({"name": new_key, "key": key})
        else:
            say(key)
        return
    settings = ServerSettings(
        host=host,
        port=port,
        keys=None if keys is None else Keys.read(keys),
        origins=tuple(allow_origin or ()),
        requests=max_requests,
        limits=Limits(upload_bytes=byte_count("--max-upload", max_upload)),
        stop_seconds=stop_seconds,
        footer=footer,
        resident=True,
    )
    # absolute, so that errors name it, and commands of any folder know it
    folders = {name: f.expanduser().absolute() for name, f in named_folders(index or [str(DEFAULT_INDEX)]).items()}
    for folder in folders.values():
        load_config(folder)  # nothing heavy is imported for an index that is not there
    if background:
        _start(next(iter(folders.values())), as_json=as_json, quiet=quiet)
        return
    from ragkv.server.heap import limit_heaps
    from ragkv.server.port import reserve

    limit_heaps()
    listening = reserve(host, port)
    try:
        from ragkv.server.process import run_server
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"Serving needs {error.name}: pip install 'ragkv[serve]'.") from error
    from ragkv.pipeline import RagKV
    from ragkv.server.served import Served

    if not quiet:
        _log_requests()
    with ExitStack() as opened:
        indexes = {}
        for name, folder in folders.items():
            rag = RagKV.open(
                folder,
                device=device,
                readonly=read_only or None,
                batch_tokens=batch_tokens,
                max_rows=max_rows,
            )
            indexes[name] = opened.enter_context(rag)
            rag.index.require_same_model()
            if not quiet:
                note(f"loading {rag.config.model} for {name}")
            rag.model  # noqa: B018 - loaded now, so that the first question need not wait

        def ready(url: str) -> None:
            _ready(url, list(indexes), as_json=as_json, quiet=quiet)

        run_server(Served(indexes), settings, ready, listening)


def _start(first: Path, *, as_json: bool, quiet: bool) -> None:
    """The same command line as a process that stays; its log is named after its first index."""
    from ragkv.cli.background import log_file, start

    words = [word for word in sys.argv[1:] if word not in ("--background", "--json")]
    told = start([*words, "--json"], log_file(first))
    if as_json:
        print_json_line(told)
        return
    say(f"ragkv serves {', '.join(told['models'])} at {told['url']} (process {told['pid']})")
    if not quiet:
        note(f"Its log is {told['log']}; ragkv stop --index {shlex.quote(str(first))} ends it.")


def _log_requests() -> None:
    """A line of JSON on stderr for each request."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log = logging.getLogger("ragkv.server.guard")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


def _ready(url: str, names: list[str], *, as_json: bool, quiet: bool) -> None:
    models = [f"ragkv/{name}" for name in names]
    if as_json:
        print_json_line({"url": f"{url}/v1", "models": models})
        return
    say(f"ragkv serves {', '.join(models)} at {url}/v1")
    if not quiet:
        note("Ctrl-C stops it.")
