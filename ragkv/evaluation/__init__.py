"""How well an index answers, measured on the user's own documents and questions (`ragkv doctor`, `ragkv tune`)."""
