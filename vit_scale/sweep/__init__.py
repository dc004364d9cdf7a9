"""Run W&B sweep files locally with Optuna, without an account."""
