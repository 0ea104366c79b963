"""Strategies that lay the model out anew in each generation: sharded, split or in stages."""
