"""Attention over cached KV: partial results and their merge, positions, visibility. It depends on no model."""
