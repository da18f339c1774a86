"""What the store holds, as bytes: rows, vectors, KV records and the keys under which KV is found (docs/formats.md)."""
