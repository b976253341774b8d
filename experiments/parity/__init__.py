"""Compares models of ``transformers`` with the same models loaded here."""
