"""Leadership: health for probes, and failover from a leader whose process is gone."""
