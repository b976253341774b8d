"""Tokenizers as published models bring them."""
