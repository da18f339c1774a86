"""One file per question, each figure printed beside its baseline (docs/design.md)."""
