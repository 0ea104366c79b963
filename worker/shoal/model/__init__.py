"""Checks and properties of torch modules and optimizers that do not depend on the strategy."""
