"""Try a recipe on this system: a few steps, an evaluation, a save and a resume (`launch/train.py RECIPE --try`)."""
