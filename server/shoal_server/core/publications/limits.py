"""Limits on published weights: times in seconds, and counts."""

LEASE_S = 30.0
"""Duration of a lease, counted from the request for it. The reader or publishing script renews its
lease after a third of this time."""
CLOCK_MARGIN = 1.1
"""Factor by which the leader keeps a lease longer than the reader or script relies on it: their
clocks differ in rate."""
HELD_S = LEASE_S * CLOCK_MARGIN
READER_FORGOTTEN_S = 120.0
"""Time of silence after which a reader is no longer shown."""
MAX_READERS = 4096
"""Maximum number of readers of a series."""
MAX_LEASES = 16
"""Maximum number of leases of a reader."""
MAX_CHILDREN = 2
"""Maximum number of relays that fetch a version from the same relay at a time: each gets half of
that relay's bandwidth."""
MAX_RELAYS = 512
"""Maximum number of relays of a version. Further readers fetch from servers and pass nothing on."""
MAX_PINS = 16
MAX_KEEP = 64
MAX_COPIES = 16
MAX_WORLD = 4096
SEGMENTS_A_WRITE = 4096
"""Number of segments after which a write revises no further version: etcd accepts requests up to
1.5 MiB."""
MAX_PENDING = 4
"""Maximum number of publications of a series that lack parts or wait to be verified. When one more
begins, the oldest is abandoned."""
ABANDONED_AFTER_S = 90.0
"""Time without a new part after which a publication is abandoned. It is less than the grace after
which servers free the publication's segments."""
ABANDONED_KEPT = 16
"""Maximum number of abandoned publications whose reasons are remembered."""
REPLACED_AFTER_S = 15.0
"""Time of absence after which a server's segments get another holder. A server that is absent for
less may only be restarting."""
LOST_AFTER_S = 60.0
"""Time after which a segment that no server has is lost, and its version with it."""
DURABLE_LOST_AFTER_S = 600.0
"""The same for a segment of a durable version: the disks of its holders may come back."""
