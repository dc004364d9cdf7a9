"""Using what was trained: loading a run, evaluating it, predicting with it."""
