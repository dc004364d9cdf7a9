"""What is learned: one package per task."""
