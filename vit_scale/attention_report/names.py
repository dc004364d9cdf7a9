"""Names under which a run records its attention. Imports no torch: the page reads them from run directories."""

TABLE = "attention_statistics"
PICTURE = "attention_overview"
DISTANCE, ENTROPY = "attention_distance", "attention_entropy"
"""Logged as `val/attention_distance_block3`: the mean over heads."""
