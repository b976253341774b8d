"""Arrays only: ``attend``, masks, memory, positions, biases, and the kernels behind them."""
