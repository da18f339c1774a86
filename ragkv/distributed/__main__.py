"""The command that every rank runs (docs/distributed.md)."""

import os
from importlib import import_module

if __name__ == "__main__":
    # before torch is loaded: its C++ side would print a stack for each lost connection, beside our sentence about it
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    # by name, as the entry point of `ragkv` is: commands are above this room
    import_module("ragkv.cli.ranks").main()
