"""Attention a block of its matrix [T, S] at a time, and statistics of what it looks at."""
