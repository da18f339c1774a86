"""The adapter of `--model smollm2`: its data, and its bundling (README.md)."""
