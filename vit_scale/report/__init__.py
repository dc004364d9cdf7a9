"""Parameters, multiply-accumulates and memory of a model, and the check against timm, without allocating a weight."""
