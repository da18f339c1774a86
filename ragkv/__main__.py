"""`ragkv`, also as `python -m ragkv`: the command line, whose imports take a moment in which Ctrl-C may come."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the `ragkv` command."""
    try:
        from ragkv.cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("ragkv: interrupted.\n")
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
