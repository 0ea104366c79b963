"""Connections to the coordinators and to other members."""
