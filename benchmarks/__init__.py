"""Benchmarks: `speed` is installed (`ragkv bench`), `papers` and `mini` are only in the repository."""
