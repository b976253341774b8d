"""Benchmarks and comparisons with other libraries; the docstring of each script says what it measures.

Each contestant is timed in its own process; medians and their ratios are printed (``contest.py``).
"""
