"""Plan a run: time, memory and communication on any number and type of GPUs, without data, devices or disk."""
