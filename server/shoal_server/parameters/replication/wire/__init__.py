"""Streams of links between servers: encoding of messages, transports, detection of silence."""
