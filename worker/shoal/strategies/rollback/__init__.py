"""Undo of a step that was not taken: buffers, weights and state that its passes have changed."""
