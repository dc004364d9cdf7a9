"""The page of a run: one self-contained HTML file with curves, images, tables, options and commands."""
