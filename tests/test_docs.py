"""What README and docs name exists: files, links, make targets, modules, config keys of the shell lines."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
#: Files that are made by a run, not kept in the repository.
MADE = {"results", ".venv"}
TOP = {"app", "deployments", "policies", "loadgen", "tests", "docs", "examples", "scripts", "requirements", ".ci"}


def read(page: Path) -> str:
    """Text of a page."""
    return page.read_text(encoding="utf-8")


def code(page: Path) -> str:
    """All code of a page, blocks and spans."""
    return "\n".join(CODE.findall(read(page)))


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+)$", re.sub(r"```.*?```", "", read(page), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def targets() -> set[str]:
    """Targets of the Makefile."""
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def name(page: Path) -> str:
    """A page's path as pytest shows it."""
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    """Each relative link leads to a file of the repository and, where it has one, to a heading in it."""
    broken = []
    for link in LINK.findall(read(page)):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = page if not file else (page.parent / file).resolve()
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_files_exist(page: Path) -> None:
    """Each path in code that begins with a folder of ours exists, as a file, folder, module or function in it."""
    paths = re.findall(rf"(?<![\w./-])((?:{'|'.join(map(re.escape, TOP))})/[\w./-]*)", code(page))
    missing = {path for path in paths if path.split("/")[0] not in MADE and not (ROOT / path.rstrip("./")).exists()}
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_make_targets_exist(page: Path) -> None:
    """Each `make x` names a target."""
    named = set(re.findall(r"\bmake ([a-z-]+)", code(page)))
    assert named <= targets(), f"no such target in the Makefile: {sorted(named - targets())}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_modules_exist(page: Path) -> None:
    """Each `python -m x` names a module that can be run, and each `a.b:c` of ours something in a module."""
    for module in re.findall(r"\bpython3? -m ([\w.]+)", code(page)):
        spec = importlib.util.find_spec(module)
        assert spec is not None, module
        if spec.submodule_search_locations:
            assert importlib.util.find_spec(f"{module}.__main__") is not None, f"{module} has no __main__"
    for module, attribute in re.findall(r"\b((?:app|deployments|policies|loadgen)\.[\w.]+):(\w+)", code(page)):
        spec = importlib.util.find_spec(module)
        assert spec is not None, module
        assert spec.origin is not None
        assert re.search(rf"^(?:class|(?:async )?def) {attribute}\b", Path(spec.origin).read_text(), re.MULTILINE)


@pytest.mark.parametrize("example", EXAMPLES, ids=name)
def test_examples_compile(example: Path) -> None:
    """Each example is valid Python and says in its first lines what it shows."""
    source = read(example)
    compile(source, str(example), "exec")
    assert source.startswith('"""')


def test_private_names_tables_tests_exist() -> None:
    """docs/structures.md names a contract test for each group of private names, and each contract test stands there."""
    page = read(ROOT / "docs" / "structures.md")
    contracts = {name(path) for path in (ROOT / "tests").rglob("test_contract_*.py")}
    assert contracts
    assert {path for path in contracts if path not in page} == set()


def test_there_is_something_to_check() -> None:
    """README, docs and examples are found, and hold links, targets and paths."""
    assert ROOT / "README.md" in PAGES
    assert len(PAGES) >= 5
    assert EXAMPLES
    assert sum(len(LINK.findall(read(page))) for page in PAGES) > 10
    assert any("make " in code(page) for page in PAGES)
