"""`docs/server.md` says what the code says: its tables, its status codes, its session headers."""

from __future__ import annotations

import ast
import re
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

import leyline.errors
from leyline import LeylineError
from leyline.server import failures
from leyline.server.session_names import SESSION_HEADERS

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def document() -> ModuleType:
    """`scripts/document`, whose name has no ending."""
    spec = spec_from_loader("document", SourceFileLoader("document", str(path_of("document"))))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def path_of(script: str) -> Path:
    return ROOT / "scripts" / script


def sections(page: str, document: ModuleType) -> dict[str, str]:
    """The text of each table that is made from the code, by its kind and what it is of."""
    found = document.SECTION.finditer(page)
    return {" ".join(filter(None, one.group(2, 3))): one[0] for one in found}


# The tables -----------------------------------------------------------------------------------


def test_the_page_has_every_table(document: ModuleType) -> None:
    fields = {f"fields {name}" for name in document.BODIES}
    assert sections(PAGE, document).keys() == fields | {
        "flags server",
        "flags engine",
        "metrics",
        "routes",
    }


def test_the_tables_are_what_the_code_says(document: ModuleType) -> None:
    assert document.written(PAGE) == PAGE, "run scripts/document"


def test_a_cell_that_says_anything_else_is_noticed(document: ModuleType) -> None:
    """The twin: the last cell of every table is another."""
    changed = document.SECTION.sub(lambda found: found[0].replace(" |\n<!--", "! |\n<!--"), PAGE)
    one, other = sections(PAGE, document), sections(changed, document)
    assert all(one[name] != other[name] for name in one)
    assert document.written(changed) == document.written(PAGE)


# The status codes -----------------------------------------------------------------------------


def told_statuses(page: str) -> set[int]:
    """Those of the table of errors; a row may have several."""
    cells = re.findall(r"^\| (\d{3}(?:, \d{3})*) \|", page, re.MULTILINE)
    return {int(status) for cell in cells for status in cell.split(", ")}


def refused_statuses(source: str) -> set[int]:
    """Those that a module of the server refuses requests with: a status that is given to
    `refusal`, or that stands in front of a code in a tuple.
    """
    found = set[int]()
    for node in ast.walk(ast.parse(source)):
        first: ast.expr | None = None
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("refusal"):
            first = node.args[0]
        elif isinstance(node, ast.Tuple) and len(node.elts) == 3:
            first = node.elts[0]
        if isinstance(first, ast.Constant) and type(first.value) is int:
            found |= {first.value} & {*range(400, 600)}
    return found


def error_statuses() -> set[int]:
    kinds = vars(leyline.errors).values()
    return {one.status for one in kinds if isinstance(one, type) and issubclass(one, LeylineError)}


def test_every_status_is_told() -> None:
    sources = (ROOT / "leyline" / "server").rglob("*.py")
    refused = {
        status for path in sources for status in refused_statuses(path.read_text(encoding="utf-8"))
    }
    assert told_statuses(PAGE) == error_statuses() | refused | {*failures._CODES}


def test_a_status_that_is_not_told_is_noticed() -> None:
    """The twin."""
    assert refused_statuses("a = refusal(418, 'no', code='teapot')\nb = (451, 'law', 'no')") == {
        418,
        451,
    }
    assert told_statuses("| 405, 415 | x |\n| 404 | y |\n") == {404, 405, 415}
    row = next(line for line in PAGE.splitlines() if line.startswith("| 412 |"))
    assert told_statuses(PAGE) - told_statuses(PAGE.replace(row, "")) == {412}


# Flags and headers in the text ----------------------------------------------------------------


def unknown_flags(page: str) -> set[str]:
    return {*re.findall(r"--[a-z][a-z0-9-]+", page)} - {
        *re.findall(r"^\| `(--\S+)` \|", PAGE, re.M)
    }


def test_every_flag_that_the_text_names_is_one() -> None:
    assert unknown_flags(PAGE) == set()
    assert unknown_flags("`--ports` seconds, `--port`") == {"--ports"}  # the twin


@pytest.mark.parametrize("name", ["server.md", "directives.md"])
def test_the_headers_that_name_sessions_are_told_in_their_order(name: str) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    told = re.findall(r"`((?:x-)?[a-z-]+-(?:id|affinity))`", text)
    assert [*dict.fromkeys(told)][: len(SESSION_HEADERS)] == [*SESSION_HEADERS]
