"""New architectures, tasks and sources, each added from outside by files alone."""
