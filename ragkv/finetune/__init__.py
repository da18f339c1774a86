"""Training: the mini models."""
