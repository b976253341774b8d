"""Searches: which tokens come next, given a model and its states. See ``crossattn.decode``."""
