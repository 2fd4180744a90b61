"""The state of delayed scaling: amaxes, their history, the scales computed from them, and their updates."""
