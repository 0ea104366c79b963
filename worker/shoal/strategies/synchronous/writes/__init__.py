"""What changes parameters and the optimizer's state within a step before the optimizer's step at
its end, and how that is taken back with a step that does not happen."""
