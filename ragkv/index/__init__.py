"""An index on disk: its model, prompt, store and encoders, and the operations on them."""
