"""How a model is trained by many: one class a strategy, found by its name."""
