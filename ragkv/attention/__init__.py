"""Attention over cached KV: partial attention and its merge, rotary positions, and which tokens see which. It knows no
model.
"""
