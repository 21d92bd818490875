"""What a machine can check of the rules of the house: who imports whom, what policies may touch, length of files."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "app": {"app", "deployments", "policies"},
    "deployments": {"deployments", "policies"},
    "policies": {"policies"},
    "loadgen": {"loadgen", "deployments", "policies"},
}
PACKAGES = tuple(MAY_IMPORT)
NOT_FOR_POLICIES = {  # clocks, chance, the outside world
    *("time", "datetime", "random", "secrets", "uuid"),
    *("os", "io", "pathlib", "sys", "logging", "socket", "subprocess", "asyncio", "threading", "multiprocessing"),
}
ENVIRONMENT = {"environ", "environb", "getenv", "putenv", "unsetenv"}
MAX_LINES = 400
FORBIDDEN_NAMES = {"utils", "util", "common", "base", "manager", "helpers", "helper", "misc"}

Rule = Callable[[str, ast.AST], Iterator[str]]


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each absolute import, wherever it stands; `from a import b` gives `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def dotted(node: ast.AST) -> str:
    """`np.random.default_rng` for the expression of that form, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def import_direction(package: str, tree: ast.AST) -> Iterator[str]:
    """app -> deployments -> policies <- loadgen; loadgen may drive the scheduler hook and router of deployments."""
    for line, name in imported(tree):
        owner = name.partition(".")[0]
        if owner in PACKAGES and owner not in MAY_IMPORT[package]:
            yield f"{line}: {package} must not import {name}"
        if owner == "tests":
            yield f"{line}: {package} must not import {name}"


def purity(package: str, tree: ast.AST) -> Iterator[str]:
    """Policies are made of the standard library and numpy, without clock, chance of their own, or I/O."""
    if package != "policies":
        return
    for line, name in imported(tree):
        owner = name.partition(".")[0]
        if owner in NOT_FOR_POLICIES:
            yield f"{line}: policies must not import {name}: pass it as an argument"
        elif owner not in {"numpy", "policies"} | sys.stdlib_module_names:
            yield f"{line}: policies must not import {name}: only the standard library and numpy"
        elif name.startswith("numpy.random") and name != "numpy.random.Generator":
            yield f"{line}: policies must not import {name}: a Generator is passed in"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and dotted(node.value) in {"np.random", "numpy.random"}:
            if node.attr != "Generator":
                yield f"{node.lineno}: policies must not use {dotted(node)}: a Generator is passed in"
        if isinstance(node, ast.Call) and dotted(node.func) in {"open", "print", "input", "__import__"}:
            yield f"{node.lineno}: policies must not call {dotted(node.func)}"


def environment(package: str, tree: ast.AST) -> Iterator[str]:
    """Below app nobody reads the environment, settings are arguments; a variable may be set for vLLM to read."""
    if package not in {"deployments", "policies"}:
        return
    for line, name in imported(tree):
        if name.partition(".")[0] == "os" and name.rpartition(".")[2] in ENVIRONMENT:
            yield f"{line}: {package} must not use {name}"
    written = {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
    }
    for node in ast.walk(tree):
        if node in written:
            continue
        if isinstance(node, ast.Attribute) and dotted(node.value) == "os" and node.attr in ENVIRONMENT:
            yield f"{node.lineno}: {package} must not use os.{node.attr}"


RULES: tuple[Rule, ...] = (import_direction, purity, environment)


def sources(*folders: str) -> list[Path]:
    """Python files under the folders, in a stable order."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("package", PACKAGES)
def test_package_keeps_the_rule(package: str, rule: Rule) -> None:
    """No file of the package breaks the rule."""
    files = sources(package)
    assert files, f"{package}/ has no Python file: the rule would check nothing"
    broken = [
        f"{path.relative_to(ROOT)}:{problem}"
        for path in files
        for problem in rule(package, ast.parse(path.read_text(encoding="utf-8"), filename=str(path)))
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("rule", "package", "code"),
    [
        (import_direction, "policies", "import deployments.wire"),
        (import_direction, "policies", "def f():\n    from app import main"),
        (import_direction, "deployments", "from app.config import Config"),
        (import_direction, "deployments", "import loadgen"),
        (import_direction, "loadgen", "import app.main"),
        (import_direction, "app", "from loadgen.lengths import Lengths"),
        (import_direction, "app", "from tests import test_imports"),
        (purity, "policies", "import ray"),
        (purity, "policies", "from vllm.v1 import request"),
        (purity, "policies", "import time"),
        (purity, "policies", "from random import choice"),
        (purity, "policies", "from numpy import random"),
        (purity, "policies", "from numpy.random import default_rng"),
        (purity, "policies", "import numpy as np\nrng = np.random.default_rng()"),
        (purity, "policies", "print(1)"),
        (environment, "deployments", "import os\nif os.environ['A']: pass"),
        (environment, "deployments", "import os\nx = os.getenv('A')"),
        (environment, "policies", "from os import environ as e"),
    ],
)
def test_rule_notices(rule: Rule, package: str, code: str) -> None:
    """Each rule finds what it forbids, also inside functions and under another name."""
    assert list(rule(package, ast.parse(code)))


@pytest.mark.parametrize(
    ("rule", "package", "code"),
    [
        (import_direction, "app", "import deployments, policies.fleet, appdirs"),
        (import_direction, "loadgen", "from deployments.scheduler import PolicyScheduler"),
        (purity, "policies", "import math\nimport numpy as np\ndef f(rng: np.random.Generator): return rng.random()"),
        (purity, "deployments", "import time, ray"),
        (environment, "deployments", "import os\nos.environ['A'] = '1'"),
        (environment, "app", "import os\nx = os.environ['A']"),
        (environment, "loadgen", "import os\nos.getenv('A')"),
    ],
)
def test_rule_lets_pass(rule: Rule, package: str, code: str) -> None:
    """The rules do not forbid what the house allows."""
    assert not list(rule(package, ast.parse(code)))


def test_files_are_short() -> None:
    """No Python file is longer than 400 lines."""
    lengths = {
        path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines())
        for path in sources(*PACKAGES, "tests", "scripts")
    }
    assert not {str(path): lines for path, lines in lengths.items() if lines > MAX_LINES}


def test_files_have_a_subject() -> None:
    """No file or folder is called utils, common, base, manager or helpers: names say what is inside."""
    named = {
        path
        for path in sources(*PACKAGES, "tests")
        for part in path.relative_to(ROOT).with_suffix("").parts
        if part in FORBIDDEN_NAMES
    }
    assert not named
