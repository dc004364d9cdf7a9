"""Where images come from: tables, folders, streams, embedded and synthetic data."""
