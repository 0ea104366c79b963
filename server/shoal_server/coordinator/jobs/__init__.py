"""Jobs of a leading coordinator: one actor each, and the Membership service."""
