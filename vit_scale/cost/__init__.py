"""What a model costs: parameters, MACs, memory, communication, and the check against timm."""
