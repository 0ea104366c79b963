"""Jobs while a coordinator leads: an actor for each, and the Membership service over them."""
