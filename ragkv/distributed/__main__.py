"""The command that every rank runs (docs/distributed.md)."""

import os
from importlib import import_module

if __name__ == "__main__":
    # before torch is loaded: its C++ code would print a stack for each lost connection, beside ragkv's own error
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    # by name, like the entry point of `ragkv`, because commands are above this package
    import_module("ragkv.cli.ranks").main()
