"""`python -m quant`: the same as the command `quant`."""

import sys

from quant.cli import main

if __name__ == "__main__":
    sys.exit(main())
