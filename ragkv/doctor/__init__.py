"""How well an index answers, measured on the user's own documents and questions, or on benchmarks."""
