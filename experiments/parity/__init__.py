"""Whether a model that was loaded here computes what ``transformers`` computes."""
