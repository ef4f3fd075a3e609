"""``python -m geoq`` is the ``geoq`` command."""

from geoq.cli import main

if __name__ == "__main__":
    main()
