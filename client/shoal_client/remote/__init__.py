"""Other machines over ssh, as the user, and the control plane that is started on them."""
