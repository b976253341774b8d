"""Files that weights come in."""
