"""Questions about a torch module or optimizer, independent of the strategy that trains it."""
