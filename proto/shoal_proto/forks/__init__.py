"""Protection of state that a forked child would find half changed.

DataLoaders fork a trainer at any time.
"""
