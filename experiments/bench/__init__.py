"""Benchmarks: each script measures both sides in one process and prints the ratio of medians."""
