"""Connections to the coordinators and to other members, with their retries and time limits."""
