"""Makes .venv with everything Tidegate needs on a CPU: `python3 scripts/setup.py` (or `make setup`).

torch is looked for in this order, and the script says which road it takes:
  1. the CPU build through pip's own configuration (an index or find-links that you have set up);
  2. the CPU build from the index named by TIDEGATE_TORCH_INDEX;
  3. the plain build with its dependencies (several GB: it carries CUDA, which stays unused).
Then the lock, requirements/cpu.txt, without dependency resolution. A second run ends at once.

Standard library only, and syntax that Python 3.6 reads, so that an old interpreter gets a clear message.
"""

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "tidegate-setup"
LOCK = ROOT / "requirements" / "cpu.txt"
STARTED = time.time()


def say(text):
    print("setup: [%4.0f s] %s" % (time.time() - STARTED, text), flush=True)


def fail(text):
    sys.exit("setup: " + text)


def pip(*args, **popen):
    """Run the venv's pip; its exit status and, with `stdout=PIPE`, its output are in the result."""
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *args]
    return subprocess.run(command, cwd=str(ROOT), universal_newlines=True, check=False, **popen)


def check_interpreter():
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        fail(
            "Python 3.11 or 3.12 is needed, this is %s (%s). Name another one: `make setup PYTHON=python3.12`"
            % (platform.python_version(), sys.executable)
        )
    if sys.platform != "linux" or platform.machine() != "x86_64":
        fail("the lock is for Linux on x86_64, this is %s on %s" % (sys.platform, platform.machine()))


def fingerprint():
    """Of all that decides what lies in .venv."""
    digest = hashlib.sha256(platform.python_version().encode())
    for file in (LOCK, ROOT / "pyproject.toml", Path(__file__)):
        digest.update(file.read_bytes())
    digest.update(str(ROOT).encode())  # a venv that was copied or moved points to the old place
    return digest.hexdigest()


def make_venv():
    """Keep a venv of this very Python, make a new one otherwise."""
    probe = "import platform, pip; print(platform.python_version())"
    if PYTHON.exists():
        found = subprocess.run([str(PYTHON), "-c", probe], stdout=subprocess.PIPE, universal_newlines=True, check=False)
        if found.stdout.strip() == platform.python_version():
            return
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        fail(
            "this Python cannot make virtual environments (no ensurepip). On Debian and Ubuntu: "
            "`apt install python%d.%d-venv`, then run this again" % sys.version_info[:2]
        )
    say("making .venv with Python %s" % platform.python_version())
    # A venv's own python (an activated .venv) cannot rebuild the folder it lives in.
    base = Path(sys.base_prefix) / "bin" / ("python%d.%d" % sys.version_info[:2])
    shutil.rmtree(str(VENV), ignore_errors=True)
    subprocess.run([str(base) if base.exists() else sys.executable, "-m", "venv", str(VENV)], check=True)


def install_torch(pin):
    """Install the CPU build of `pin` ("torch==x.y.z") from the first place that has it, else the plain build."""
    cpu = pin + "+cpu"
    installed = [str(PYTHON), "-c", "import importlib.metadata as m; print(m.version('torch'))"]
    found = subprocess.run(
        installed, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, universal_newlines=True, check=False
    )
    if found.stdout.strip().split("+")[0] == pin.split("==")[1]:
        return say("torch %s is there already" % found.stdout.strip())
    roads: "list[tuple[str, list[str]]]" = [("pip's own configuration", [])]
    index = os.environ.get("TIDEGATE_TORCH_INDEX")
    if index:
        roads.append(("TIDEGATE_TORCH_INDEX", ["--index-url", index]))
    for name, options in roads:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        probe = pip("install", "--dry-run", "--no-deps", *options, cpu, **quiet)
        if probe.returncode == 0:
            say("%s: the CPU build, found through %s" % (cpu, name))
            if pip("install", "--no-deps", *options, cpu).returncode:
                fail("installing %s failed (see above)" % cpu)
            return None
        say("%s: not found through %s" % (cpu, name))
    say(
        "%s: taking the plain build with its dependencies, several GB. For the small one set TIDEGATE_TORCH_INDEX" % pin
    )
    say("    to the address of PyTorch's CPU wheel index, which PyTorch's install page shows, and start again")
    if pip("install", pin).returncode:
        fail("installing %s failed (see above)" % pin)
    return None


def install_lock(total):
    """Install the lock, one line per package on a terminal's last line, every 20th elsewhere."""
    say("installing %d locked packages" % total)
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--progress-bar", "off"]
    process = subprocess.Popen(
        [*command, "-r", str(LOCK)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True
    )
    lines, seen = [], 0
    for line in process.stdout or ():
        lines.append(line)
        match = re.match(r"(?:Collecting|Processing|Requirement already satisfied:) (?:.*/)?([^\s=]+)", line)
        if match:
            seen += 1
            if sys.stdout.isatty():
                print("\r\033[K              %d/%d %s" % (seen, total, match.group(1)), end="", flush=True)
            elif seen % 20 == 0:
                say("    %d/%d" % (seen, total))
        elif line.startswith("Installing collected"):
            print("\r\033[K" if sys.stdout.isatty() else "", end="")
            say("    unpacking")
    if process.wait():
        fail("pip could not install the lock:\n" + "".join(lines[-15:]))


def check_import():
    say("checking that torch and vLLM import")
    code = "import torch, vllm; print('torch', torch.__version__, '| vLLM', vllm.__version__)"
    result = subprocess.run(
        [str(PYTHON), "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True, check=False
    )
    if result.returncode:
        fail("vLLM does not import:\n" + result.stderr[-3000:])
    say(result.stdout.splitlines()[-1])


def main():
    check_interpreter()
    wanted = fingerprint()
    with LOCK.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two `make` at once: the second waits and finds the work done
        if PYTHON.exists() and STAMP.exists() and STAMP.read_text() == wanted:
            return
        pins = [line.strip() for line in lock if line.strip() and not line.startswith("#")]
        STAMP.unlink(missing_ok=True)
        make_venv()
        install_torch(next(pin for pin in pins if pin.startswith("torch==")))
        install_lock(len(pins))
        if pip("install", "--quiet", "--no-deps", "--no-build-isolation", "-e", ".").returncode:
            fail("installing Tidegate itself failed (see above)")
        check_import()
        STAMP.write_text(wanted)
        say(".venv is ready")


if __name__ == "__main__":
    main()
