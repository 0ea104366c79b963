"""The parameter servers, as the coordinator asks them."""
