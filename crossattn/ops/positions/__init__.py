"""Position encodings: sinusoids, features of grids, rotations of queries and keys, biases of distance."""

from crossattn.ops.positions.fourier import fourier, fourier_dim
from crossattn.ops.positions.sinusoids import inverse_wavelengths, sinusoid_table, sinusoidal

__all__ = ["fourier", "fourier_dim", "inverse_wavelengths", "sinusoid_table", "sinusoidal"]
