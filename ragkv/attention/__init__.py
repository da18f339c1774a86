"""Attention over cached KV: partial results and their merge, positions, who sees what. It knows no model."""
