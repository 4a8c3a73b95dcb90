"""Several processes: collectives, joining torchrun, and work of the first process."""
