"""What is done to logits before a token is chosen: processors, and choosing among many fast."""
