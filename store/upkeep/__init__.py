"""Looking after a store: statistics, verification, repair, garbage collection, copies (docs/operations.md)."""
