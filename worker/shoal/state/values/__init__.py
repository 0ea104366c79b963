"""What of a state is no tensor: as JSON, and back."""
