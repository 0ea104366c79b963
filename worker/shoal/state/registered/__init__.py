"""Registered state of the script: schedulers, averages and samplers, committed with each step."""
