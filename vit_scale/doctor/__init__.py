"""Check whether training can be trusted on this machine, and how fast it is."""
