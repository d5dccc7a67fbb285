"""`python -m bcl_grain`: see `bcl_grain.cli`."""

import sys

from bcl_grain.cli import main

if __name__ == "__main__":
    sys.exit(main())
