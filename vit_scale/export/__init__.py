"""Export a trained model to other formats. Every export is loaded and verified before it is moved into place."""
