"""Fine-tuning of the user's own model for blocks, and the training of the bundled embedder and reranker."""
