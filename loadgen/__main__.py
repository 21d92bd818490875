"""`python -m loadgen`."""

import sys

from loadgen.cli import main

if __name__ == "__main__":
    sys.exit(main())
