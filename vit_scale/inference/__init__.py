"""Using a trained model: loading a run, evaluating it, predicting with it."""
