"""How the bundled models are trained: `python -m ragkv.benchmarks.mini` (docs/mini.md)."""
