"""Modules of unchanged models that cast for the FP8 layers behind them: which do, which do not, and why."""
