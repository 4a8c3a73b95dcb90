"""Many runs: jobs in processes of this machine, on SLURM or Ray; hyper-parameter search; estimates of cost."""
