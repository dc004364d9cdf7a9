"""The page of a run: one HTML file with curves, pictures, options and commands that needs no network to be viewed."""
