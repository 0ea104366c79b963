"""Limits on published weights."""

LEASE_S = 30.0
"""Duration of a lease from its request; it is renewed after a third of this time."""
CLOCK_MARGIN = 1.1
"""Factor by which the leader keeps a lease longer than its owner relies on it: clocks differ in
rate."""
HELD_S = LEASE_S * CLOCK_MARGIN
READER_FORGOTTEN_S = 120.0
"""Time of silence after which a reader is no longer shown."""
MAX_READERS = 4096
MAX_LEASES = 16
MAX_CHILDREN = 2
"""Relays that fetch a version from one relay at a time, and share its bandwidth."""
MAX_RELAYS = 512
"""Relays of a version; further readers pass nothing on."""
MAX_PINS = 16
MAX_KEEP = 64
MAX_COPIES = 16
MAX_WORLD = 4096
SEGMENTS_A_WRITE = 4096
"""Segments after which a write revises no further version: etcd accepts 1.5 MiB."""
MAX_PENDING = 4
"""Unfinished publications of a series; one more abandons the oldest."""
ABANDONED_AFTER_S = 90.0
"""Time without a new part after which a publication is abandoned, before servers free its segments.
"""
ABANDONED_KEPT = 16
"""Number of abandoned publications with a remembered reason."""
REPLACED_AFTER_S = 15.0
"""Absence after which a server's segments get another holder: it may be restarting before."""
LOST_AFTER_S = 60.0
"""Time after which a segment without a server is lost, with its version."""
DURABLE_LOST_AFTER_S = 600.0
"""The same for a durable version, longer since the holders' disks may come back."""
