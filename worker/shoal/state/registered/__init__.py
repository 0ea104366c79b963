"""Registered state of the script, such as schedulers, averages and samplers. It is committed with
each step, as the model is."""
