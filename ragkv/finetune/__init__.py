"""Fine-tuning of the user's own model: for the engine `block`, and retaining heads for `apb`."""
