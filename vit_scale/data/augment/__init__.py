"""Crop, resize and augment single images."""
