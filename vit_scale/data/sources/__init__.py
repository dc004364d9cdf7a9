"""Image sources: tables, directories, streams, embedded and synthetic data."""
