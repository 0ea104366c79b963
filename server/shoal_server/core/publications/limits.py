"""Limits on published weights."""

LEASE_S = 30.0
"""Duration of a lease from its request; a renewal follows after a third of it."""
CLOCK_MARGIN = 1.1
"""Factor by which the leader keeps leases longer than their owners do: clocks differ in rate."""
HELD_S = LEASE_S * CLOCK_MARGIN
READER_FORGOTTEN_S = 120.0
"""Time of silence after which a reader is no longer shown."""
MAX_READERS = 4096
MAX_LEASES = 16
MAX_CHILDREN = 2
"""Relays that fetch from one relay at a time."""
MAX_RELAYS = 512
"""Relays of a version; further readers pass nothing on."""
MAX_PINS = 16
MAX_KEEP = 64
MAX_COPIES = 16
MAX_WORLD = 4096
MAX_RECORD_BYTES = 1024 * 1024
"""Bound on a version's record, and on the versions that one write revises. A request to etcd has at
most 1.5 MiB, and the head is in it, too."""
MAX_PENDING = 4
"""Unfinished publications of a series; a further publication abandons the oldest."""
ABANDONED_AFTER_S = 600.0
"""Time without a new part after which a publication is abandoned. A rank may take this long to send
its part: after the same time, its client gives up and reports that. Servers free the segments of a
publication earlier if all its ranks are gone."""
ABANDONED_KEPT = 16
"""Abandoned publications with a kept reason."""
REPLACED_AFTER_S = 15.0
"""Absence after which a server is replaced; a shorter one may be a restart."""
LOST_AFTER_S = 60.0
"""Time after which a segment that no server has is lost."""
DURABLE_LOST_AFTER_S = 600.0
"""The same time for a durable version: longer, since its holders' disks may come back."""
