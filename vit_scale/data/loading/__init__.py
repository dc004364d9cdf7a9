"""Batches, built by worker processes."""
