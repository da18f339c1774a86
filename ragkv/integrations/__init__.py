"""ragkv inside other frameworks; each needs its own extra, and nothing is imported before it is asked for."""
