"""`python -m shoal_client`: the `shoal` command, if scripts are not on the PATH."""

import sys

from shoal_client.cli import main

if __name__ == "__main__":
    sys.exit(main())
