"""Judge frozen features: k-NN classification, linear probes, and projections to two dimensions."""
