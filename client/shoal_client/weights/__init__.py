"""Published weights: clients that publish, and that fetch versions."""
