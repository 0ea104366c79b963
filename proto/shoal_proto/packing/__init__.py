"""What many members are told, in few bytes."""
