"""What happens to one image between the file and the model."""
