"""What a run writes and prints: metrics, summary, trackers, terminal output."""
