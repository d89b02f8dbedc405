"""A job under Slurm: an array of machines."""
