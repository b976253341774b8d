"""Logits processors, and fast choice of a token among many."""
