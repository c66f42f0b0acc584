"""`python -m eagleray`: the same as the command `eagleray`."""

import sys

from eagleray.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
