"""Plans scored on traces, and results as commands write them."""
