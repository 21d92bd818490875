"""`python -m app.dashboards`: list, export or push the dashboards."""

import sys

from app.dashboards.cli import main

sys.exit(main())
