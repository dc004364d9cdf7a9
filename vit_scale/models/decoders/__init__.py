"""Layers after a backbone: what reads its tokens, one file per task."""
