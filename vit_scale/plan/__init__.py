"""What a run would take, on any number of GPUs of any kind, without data, devices or disk."""
