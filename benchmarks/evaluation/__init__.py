"""How well engines answer and indexes find, measured on benchmarks: `python -m ragkv.benchmarks.evaluation`."""
