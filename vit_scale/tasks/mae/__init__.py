"""Masked autoencoding: reconstruct the pixels of masked patches, without labels."""
