"""Groups of ranks that mpiexec started, over mpi4py."""
