"""`python -m shoal_client` is the `shoal` command, for where scripts are not on the PATH."""

import sys

from shoal_client.cli import main

if __name__ == "__main__":
    sys.exit(main())
