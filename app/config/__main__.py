"""`python -m app.config FILE` checks a Serve file; without FILE it prints the reference page of the configuration."""

import sys
from pathlib import Path

from app.config.docs import reference
from app.config.errors import ConfigError
from app.config.files import check_file

if sys.argv[1:] in (["-h"], ["--help"]):
    print(f"{__doc__} `python -m app config --help` has more.")
    sys.exit()
if len(sys.argv) == 1:
    print(reference(), end="")
    sys.exit()
try:
    check_file(Path(sys.argv[1]))
except ConfigError as error:
    sys.exit(f"{sys.argv[1]} cannot be served:\n{error}")
print(f"{sys.argv[1]} is valid")
