"""Workloads, load clients and measurements; one door: `python -m loadgen`."""
