"""Built-in subjects: this project's kernels, the eager implementation, other packages as installed."""
