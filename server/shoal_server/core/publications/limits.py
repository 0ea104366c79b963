"""Times and counts of published weights."""

LEASE_S = 30.0
"""A reader's lease and a script's, from when it asked: it renews them three times as often."""
CLOCK_MARGIN = 1.1
"""The leader holds a lease for longer than its holder counts on it: clocks differ in rate."""
HELD_S = LEASE_S * CLOCK_MARGIN
READER_FORGOTTEN_S = 120.0
"""A silent reader is shown for so long."""
MAX_READERS = 4096
"""Of one series."""
MAX_LEASES = 16
"""Of one reader."""
MAX_CHILDREN = 2
"""Relays that fetch a version from one relay at a time: each has a half of what that one can
send."""
MAX_RELAYS = 512
"""Relays of one version. Further ones fetch from servers, and pass nothing on."""
MAX_PINS = 16
MAX_KEEP = 64
MAX_COPIES = 16
MAX_WORLD = 4096
SEGMENTS_A_WRITE = 4096
"""Whose holders are replaced in one write: etcd takes requests up to 1.5 MiB."""
MAX_PENDING = 4
"""Publications of a series that are being gathered at once: a further one takes the place of the
oldest."""
ABANDONED_AFTER_S = 90.0
"""A publication of which nothing was heard for so long is abandoned: less than the servers' grace,
after which its segments are freed."""
ABANDONED_KEPT = 16
"""Publications of which it is remembered why they were abandoned."""
REPLACED_AFTER_S = 15.0
"""A server that was away for so long gets its segments replaced: it may have been restarted."""
LOST_AFTER_S = 60.0
"""A segment that no server has for so long is lost, and its version with it ..."""
DURABLE_LOST_AFTER_S = 600.0
"""... and one that lies on disks, which may come back."""
