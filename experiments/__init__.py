"""Launchers: train, evaluate, translate, the demo; and the tasks and benchmarks behind them."""
