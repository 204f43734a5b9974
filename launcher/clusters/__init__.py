"""The kinds of cluster a job is rendered for: this machine, Slurm, Kubernetes."""
