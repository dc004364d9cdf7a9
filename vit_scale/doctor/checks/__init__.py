"""One file per group of checks; a check is a function from a `Setup` to one or more `Check`s."""
