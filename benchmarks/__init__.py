"""Benchmarks of the fused operations against XLA: `python benchmarks/run.py --help`."""
