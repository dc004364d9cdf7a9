"""Charts in HTML pages that need no network and no library: line charts, scatter plots and confusion matrices."""
