"""What every op shares: the plan cache, memory layouts, checks of arguments, registration. It knows no operation."""
