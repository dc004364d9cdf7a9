"""Sweeps without an account: the files that `wandb sweep` takes, run on this machine with optuna."""
