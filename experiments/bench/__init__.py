"""Benchmarks and comparisons with other libraries; each script says first what it measures, and of whom.

Contestants that are timed have a process each, and medians and their ratios are printed (``contest.py``).
"""
