"""Benchmarks: `speed` is installed (`ragkv bench`), the others are only in the repository."""
