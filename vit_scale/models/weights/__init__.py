"""Initial weights, weights files, and fitting weights to a model."""
