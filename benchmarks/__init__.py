"""Measurements: one file per question, each figure printed beside its baseline (DESIGN §8)."""
