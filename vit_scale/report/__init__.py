"""Report parameters, MACs and memory of models, and compare them with timm, without allocating weights."""
