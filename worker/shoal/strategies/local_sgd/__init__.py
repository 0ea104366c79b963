"""Strategies whose members train their own copies of the model and average them each round."""
