"""Where things stand: sinusoids, rotations of queries and keys, biases of distance."""
