"""`shoal run`: starts a host's workers and watches them."""
