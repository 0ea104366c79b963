"""Published weights: publishing a rank's segment, and fetching versions."""
