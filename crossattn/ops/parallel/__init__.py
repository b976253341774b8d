"""Attention over devices: operands that stay where they lie, memories in parts, rings."""
