"""Installs the programs of Debian that the tests drive, where they are missing: `python3 scripts/debian.py`.

Needs root and apt-get; without them it names what is missing and goes on, and the tests that need it say so.
"""

import os
import shutil
import subprocess
import sys

PACKAGES = {"chromium": "chromium", "prometheus": "prometheus"}  # program: package


def main() -> int:
    """Install what is missing; exit status 1 if apt-get fails."""
    missing = sorted(package for program, package in PACKAGES.items() if shutil.which(program) is None)
    if not missing:
        return 0
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        print(f"debian: missing: {', '.join(missing)}; tests that need them fail. As root: {' '.join(command)}")
        return 0
    # A package must not start its service: that is what invoke-rc.d asks this variable for.
    environment = dict(os.environ, DEBIAN_FRONTEND="noninteractive", RUNLEVEL="1")
    for step in (["apt-get", "update", "-qq"], command):
        if subprocess.run(step, env=environment, stdout=subprocess.DEVNULL, check=False).returncode != 0:
            print(f"debian: failed: {' '.join(step)}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
