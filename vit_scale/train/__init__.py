"""The training loop, its state, optimizers and signals."""
