"""Tuning of a job's layout by paired trials, and sweeps over lists of layouts."""
