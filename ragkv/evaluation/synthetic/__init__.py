"""Tasks that need no file: each a function of a seed and of sizes, in plain text, the same for every tokenizer."""
