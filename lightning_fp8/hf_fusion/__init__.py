"""Norms and MLPs of Hugging Face models that cast for the layers behind them: found, retyped, computed."""
