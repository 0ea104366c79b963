"""What a strategy holds and moves, computed from shapes before anything runs."""
