"""Undo of a step that is not committed: buffers, weights and state that its passes have changed."""
