"""Protection of state that a forked child would find half changed: DataLoaders may fork a trainer
at any time.
"""
