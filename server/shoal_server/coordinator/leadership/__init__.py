"""Which coordinator leads: health for probes, and taking over from a leader that is gone."""
