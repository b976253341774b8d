"""Families of published models, a file each: the meaning of their configs, the names of their tensors."""
