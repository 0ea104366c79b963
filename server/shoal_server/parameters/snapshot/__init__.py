"""Cuts through a job on all servers at one instant, while pushes go on."""
