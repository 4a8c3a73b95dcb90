"""Training: the loop, its state, validation, and the files of a run."""
