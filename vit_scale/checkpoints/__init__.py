"""Run directories and checkpoints: writing, reading and resuming. The only package that knows the format."""
