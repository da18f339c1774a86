"""Fictional worlds, whose facts no model has seen, so that a right answer proves that the context was read."""
