"""Where a ViT looks: statistics, maps and rollout of its attention weights, for every kind of attention."""
