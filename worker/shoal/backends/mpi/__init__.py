"""Ranks that mpiexec started, over mpi4py."""
