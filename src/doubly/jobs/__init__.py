"""Many runs: jobs in processes of this machine, on SLURM or Ray; hyperparameter search; estimates of cost."""
