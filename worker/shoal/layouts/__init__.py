"""How a model lies over the ranks of one group: one module for each way."""
