"""Training runs: the loop, its state, validation and checkpoints of a run."""
