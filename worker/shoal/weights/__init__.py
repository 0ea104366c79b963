"""Published weights: what training sessions publish, and what readers outside of them install."""
