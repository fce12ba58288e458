"""Benchmarks of the kernels; each is a command that prints a table and writes JSON."""
