"""One index on disk: its model, prompt, store and encoders, and what a question or its upkeep needs of them."""
