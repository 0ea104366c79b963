"""The threads of a membership, and the stream that one of them holds."""
