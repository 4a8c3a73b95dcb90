"""Many runs: pools of processes, SLURM, Ray, hyperparameter search, cost estimates."""
