"""Run the ``geoq`` command with ``python -m geoq``."""

from geoq.cli import main

if __name__ == "__main__":
    main()
