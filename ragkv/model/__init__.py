"""A transformers model as ragkv runs it; only this package touches the internals of transformers."""
