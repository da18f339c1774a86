"""Attention over cached KV: parts and their merge, rotary positions, and what a row sees. Maths only, no model."""
