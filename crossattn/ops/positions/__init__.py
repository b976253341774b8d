"""Where things stand: sinusoids, rotations of queries and keys, biases of distance."""

from crossattn.ops.positions.sinusoids import inverse_wavelengths, sinusoid_table, sinusoidal

__all__ = ["inverse_wavelengths", "sinusoid_table", "sinusoidal"]
