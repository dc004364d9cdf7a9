"""Distillation: classification that also learns from a teacher's outputs."""
