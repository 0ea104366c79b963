"""Plans: memory and traffic of a strategy, computed from shapes before anything runs."""
