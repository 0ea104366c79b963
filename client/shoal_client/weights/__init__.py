"""Published weights: clients that publish a rank's segment, and that fetch versions."""
