"""How the bundled models are trained: `python -m ragkv.benchmarks.training.mini` (docs/mini.md)."""
