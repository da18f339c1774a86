"""How the bundled language model is trained: `python -m ragkv.benchmarks.mini` (docs/mini.md)."""
