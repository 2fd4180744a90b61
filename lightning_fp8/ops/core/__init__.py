"""The core that every op shares: plan cache, memory layouts, checks of arguments, registration. It knows no op."""
