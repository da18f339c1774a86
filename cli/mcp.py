"""`ragkv mcp`: the index as tools for assistants and editors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragkv.cli.console import note, print_json_line, say
from ragkv.cli.option import DEFAULT_INDEX, Device, Index, Json, Quiet
from ragkv.config import load_config
from ragkv.errors import MissingExtraError

__all__ = ["mcp"]


def mcp(
    index: Index = DEFAULT_INDEX,
    http: Annotated[
        bool, typer.Option("--http", help="Listen on --host and --port, instead of stdin and stdout.")
    ] = False,
    host: Annotated[str, typer.Option(help="Address of --http; others than this machine's need --keys.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of --http; 0 takes a free one.", min=0, max=65535)] = 8081,
    keys: Annotated[Path | None, typer.Option(help="File of hashed keys for --http; see `ragkv serve`.")] = None,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Give assistants and editors the index as tools, by the Model Context Protocol: search, ask, show, list_documents.

    An assistant starts this command itself and talks to it over stdin and stdout. The tools only read.

    Example: `claude mcp add handbook -- ragkv mcp --index ~/handbook`
    """
    if http:
        from ragkv.server.key import Keys
        from ragkv.server.port import reserve
        from ragkv.server.setting import ServerSettings

        settings = ServerSettings(host=host, port=port, keys=None if keys is None else Keys.read(keys))
        listening = reserve(host, port)
    load_config(index)  # nothing heavy is imported for an index that is not there
    try:
        from ragkv.server.tool import make_tools

        if http:
            from ragkv.server.process import run_tools
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"This needs {error.name}: pip install 'ragkv[mcp,serve]'.") from error
    from ragkv.pipeline import RagKV

    with RagKV.open(index, device=device) as rag:
        rag.index.require_same_model()
        tools = make_tools(rag, index.resolve().name)
        if http:

            def ready(url: str) -> None:
                _ready(f"{url}/mcp", index, as_json=as_json, quiet=quiet)

            run_tools(tools, settings, ready, listening)
        else:
            tools.run()


def _ready(url: str, index: Path, *, as_json: bool, quiet: bool) -> None:
    if as_json:
        print_json_line({"url": url})
        return
    say(f"the tools of {index} are at {url}")
    if not quiet:
        note("Ctrl-C stops them.")
