"""Families of published models, a file each: its configuration, and where each parameter is."""
