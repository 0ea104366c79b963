"""Registered state of the script: schedulers, averages, samplers. It is committed with each step,
as the model is."""
