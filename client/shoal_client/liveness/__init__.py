"""How a launcher and its workers on one host show that a worker is alive."""
