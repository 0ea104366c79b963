"""Weights that training sessions or scripts publish, and that readers outside a job install."""
