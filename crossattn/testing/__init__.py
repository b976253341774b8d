"""What attend promises, as checks that hold any callable of its signature to a float64 oracle."""
