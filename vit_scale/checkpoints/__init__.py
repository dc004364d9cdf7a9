"""Run directories and checkpoints: the only package that knows their format. Knows no model, task or strategy."""
