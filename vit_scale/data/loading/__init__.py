"""Batches, built by data-loading workers."""
