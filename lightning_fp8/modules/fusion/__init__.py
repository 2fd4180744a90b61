"""Modules of unchanged models that compute with the FP8 layers behind them."""
