"""Strategies that lay the model out anew in each generation: whole, sharded, split or in stages."""
