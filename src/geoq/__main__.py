"""``python -m geoq``."""

import sys

from geoq.cli import main

if __name__ == "__main__":
    sys.exit(main())
