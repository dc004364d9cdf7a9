"""Layers of a ViT other than attention: patch and position embedding, MLP, dropout and stochastic depth."""
