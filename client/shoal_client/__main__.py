"""The `shoal` command as `python -m shoal_client`."""

import sys

from shoal_client.cli import main

if __name__ == "__main__":
    sys.exit(main())
