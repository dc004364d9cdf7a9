"""Cost of a model: parameters, MACs, memory, communication, and a comparison with timm."""
