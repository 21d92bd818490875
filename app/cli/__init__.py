"""The command line: `python -m app`, or `tidegate` once it is installed."""
