"""Analysis of attention: what it does, told from its weights."""
