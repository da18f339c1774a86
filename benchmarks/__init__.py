"""Measurements: `speed` is installed (`ragkv bench`), `papers` and `mini` are in the repository alone."""
