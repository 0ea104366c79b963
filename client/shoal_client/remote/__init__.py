"""Other machines over ssh, and the control plane on them."""
