"""The house rules of design.md, read off the source: who may import whom, sizes, docstrings.

Nothing here imports Leyline. Each rule is a function from sources to complaints, and each has a
twin that shows it a small offence, so that a rule which has stopped looking is noticed.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Everything that decides. A new module of the mind is named here and in pyproject.toml (strict
# types, branch coverage).
MIND = frozenset(
    {
        "leyline.context",
        "leyline.directive",
        "leyline.applying",
        "leyline.align",
        "leyline.coverage",
        "leyline.sequence",
        "leyline.batch",
        "leyline.sampling",
        "leyline.policy",
        "leyline.scheduler",
        "leyline.splice",
        "leyline.session",
        "leyline.sessions",
        "leyline.marks",
        "leyline.idempotency",
        "leyline.roster",
        "leyline.rows",
        "leyline.receipts",
        "leyline.rehearsal",
        "leyline.origins",
        "leyline.purge",
        "leyline.events",
        "leyline.cache.ledger",
        "leyline.cache.radix",
        "leyline.cache.prefix",
    }
)
# Everything that computes.
MUSCLE = ("leyline.kernels", "leyline.model", "leyline.cache.latent", "leyline.executor")
# Everything that neither decides nor computes: it lets callers in, words through and errors out.
DOORS = (
    "leyline.errors",
    "leyline.config",
    "leyline.cli",
    "leyline.__main__",
    "leyline.engine",
    "leyline.conversation",
    "leyline.loop",
    "leyline.desk",
    "leyline.rendering",
    "leyline.closing",
    "leyline.grammar",
    "leyline.stats",
    "leyline.session_desk",
    "leyline.jobs",
    "leyline.job",
    "leyline.turn",
    "leyline.editing",
    "leyline.reach",
    "leyline.rates",
    "leyline.pointing",
    "leyline.target",
    "leyline.spelling",
    "leyline.rewriting",
    "leyline.message_cuts",
    "leyline.merging",
    "leyline.bpe_vocabulary",
    "leyline.tiktoken_vocabulary",
    "leyline.tokenizer_files",
    "leyline.template_meter",
    "leyline.template_sandbox",
    "leyline.template_tree",
    "leyline.hub",
    "leyline.convert",
    "leyline.doctor",
    "leyline.diagnosis",
    "leyline.gguf_file",
    "leyline.llama",
    "leyline.llama_source",
    "leyline.llama_forward",
    "leyline.saved_sessions",
    "leyline.saved_fields",
    "leyline.door",
    "leyline.parts",
    "leyline.reply",
    "leyline.trimming",
    "leyline.edit_fields",
    "leyline.own_policy",
    "leyline.server",
    "leyline.tokenizer",
    "leyline.template",
    "leyline.embedded",
    "leyline.llama_as_mla",
)
TENSOR_LIBRARIES = ("torch", "triton")
# Oracles stay in tests; a pickle runs whatever its author wrote.
BANNED = ("transformers", "pickle", "cPickle", "dill", "cloudpickle", "joblib")
BEHIND_THE_ENGINE = ("leyline.scheduler", "leyline.executor", "leyline.cache", "leyline.model")
MAY_READ_ENVIRONMENT = frozenset({"leyline.cli", "leyline.config", "leyline.embedded"})
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60

Sources = Mapping[str, str]  # dotted module name -> source text; a package is named like a module
Function = ast.FunctionDef | ast.AsyncFunctionDef


def read_package() -> dict[str, str]:
    """Every module under leyline/, by its dotted name."""
    return {
        module_name(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in sorted((ROOT / "leyline").rglob("*.py"))
    }


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_package(name: str, sources: Sources) -> bool:
    return any(other.startswith(name + ".") for other in sources)


def is_within(name: str, roots: Iterable[str]) -> bool:
    """Whether `name` is one of `roots` or lies below one."""
    return any(name == root or name.startswith(root + ".") for root in roots)


def imports_of(name: str, sources: Sources) -> set[str]:
    """What a module imports, anywhere in it: at the top, in functions, for type checking only.

    `from leyline import errors` counts as `leyline.errors` if that is a module, and as `leyline`
    if it is a name of the package. Importing `a.b.c` also counts as importing the package `a.b`,
    whose `__init__` then runs; the root package is left out there, or every module would
    import the engine.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(sources[name])):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found |= from_import_targets(node, name, sources)
    return found | {parent for target in found for parent in packages_above(target)}


def from_import_targets(node: ast.ImportFrom, importer: str, sources: Sources) -> set[str]:
    base = node.module or ""
    if node.level:
        parts = importer.split(".")
        up = node.level - is_package(importer, sources)
        base = ".".join([*parts[: len(parts) - up], *([base] if base else [])])
    candidates = {f"{base}.{alias.name}" for alias in node.names}
    modules = {target for target in candidates if target in sources}
    return modules | ({base} if len(modules) < len(candidates) else set())


def packages_above(target: str) -> list[str]:
    parts = target.split(".")
    return [".".join(parts[:end]) for end in range(2, len(parts))]


def closure(name: str, sources: Sources) -> dict[str, str]:
    """Everything `name` reaches through Leyline's own modules, each with who imports it."""
    reached: dict[str, str] = {}
    waiting = [name]
    while waiting:
        importer = waiting.pop()
        for target in imports_of(importer, sources) - reached.keys():
            reached[target] = importer
            if target in sources:
                waiting.append(target)
    return reached


def mind_offences(sources: Sources) -> Iterator[str]:
    """The mind imports no tensor library and no muscle, not even through another module."""
    forbidden = (*TENSOR_LIBRARIES, *MUSCLE)
    for name in sorted(MIND & sources.keys()):
        for target, importer in closure(name, sources).items():
            if is_within(target, forbidden) or target == "leyline":
                yield f"{name} is mind but reaches {target} (imported by {importer})"


def placing_offences(sources: Sources) -> Iterator[str]:
    """Every module is mind, muscle or door: one that nobody placed would escape the other rules."""
    for name in sorted(sources.keys() - MIND):
        rooms = (*MUSCLE, *DOORS)
        if not is_within(name, rooms) and not is_package(name, sources):
            yield f"{name} is in no room: name it in MIND (and pyproject.toml), MUSCLE or DOORS"


def direction_offences(sources: Sources) -> Iterator[str]:
    """The directions of design.md section 4 that hold for whole rooms."""
    for name in sorted(sources):
        for target in sorted(imports_of(name, sources)):
            if is_within(target, BANNED):
                yield f"{name} imports {target}, which nobody may"
            if is_within(name, ["leyline.kernels"]) and is_foreign_to_kernels(target):
                yield f"{name} imports {target}: kernels know only errors and each other"
            if is_within(name, ["leyline.model"]) and is_within(target, ["leyline.cache"]):
                yield f"{name} imports {target}: a model is handed its rows"
            if is_within(name, ["leyline.server"]) and is_within(target, BEHIND_THE_ENGINE):
                yield f"{name} imports {target}: the server talks to the engine alone"


def is_foreign_to_kernels(target: str) -> bool:
    ours = is_within(target, ["leyline"])
    return ours and not is_within(target, ["leyline.errors", "leyline.kernels"])


def environment_offences(sources: Sources) -> Iterator[str]:
    """Only the doors read the environment; everybody else is told."""
    for name in sorted(sources.keys() - MAY_READ_ENVIRONMENT):
        for node in ast.walk(ast.parse(sources[name])):
            if reads_environment(node):
                yield f"{name} reads the environment in line {getattr(node, 'lineno', 0)}"


def reads_environment(node: ast.AST) -> bool:
    names = {"environ", "environb", "getenv", "getenvb"}
    if isinstance(node, ast.Attribute):
        return node.attr in names and isinstance(node.value, ast.Name) and node.value.id == "os"
    if isinstance(node, ast.ImportFrom):
        return node.module == "os" and any(alias.name in names for alias in node.names)
    return False


def size_offences(sources: Sources) -> Iterator[str]:
    for name, text in sorted(sources.items()):
        if (lines := len(text.splitlines())) > MAX_MODULE_LINES:
            yield f"{name} has {lines} lines, over {MAX_MODULE_LINES}"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, Function) and function_lines(node) > MAX_FUNCTION_LINES:
                lines = function_lines(node)
                yield f"{name}.{node.name} has {lines} lines, over {MAX_FUNCTION_LINES}"


def function_lines(node: Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def docstring_offences(sources: Sources) -> Iterator[str]:
    """Modules, public classes, and public functions and methods say what they do."""
    for name, text in sorted(sources.items()):
        tree = ast.parse(text)
        if ast.get_docstring(tree) is None:
            yield f"{name} has no docstring"
        for path, node in public_definitions(tree, name):
            if ast.get_docstring(node) is None:
                yield f"{path} has no docstring"


def public_definitions(
    scope: ast.Module | ast.ClassDef, path: str
) -> Iterator[tuple[str, ast.ClassDef | Function]]:
    for node in scope.body:
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if node.name.startswith("_") or is_second_face(node):
            continue
        yield f"{path}.{node.name}", node
        if isinstance(node, ast.ClassDef):
            yield from public_definitions(node, f"{path}.{node.name}")


def is_second_face(node: ast.ClassDef | Function) -> bool:
    """Setters, deleters and overloads are told where the name first appears."""
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    return any(text.endswith(("overload", ".setter", ".deleter")) for text in decorators)


# Written so that neither pattern matches its own text.
MACHINE_PATH = re.compile(r"(?<![\w.~/-])/(?:work|root|home|Users|opt|usr/local|private|mnt)/[\w.]")
REGISTRY_HOST = re.compile(
    r"\b(?:pypi\.org|pythonhosted\.org|npmjs\.(?:org|com)|yarnpkg\.com|debian\.org"
    r"|crates\.io|golang\.org|download\.pytorch\.org|anaconda\.org)\b"
)


def text_offences(texts: Mapping[str, str]) -> Iterator[str]:
    """No path of one machine and no registry's host: they are true in one place only."""
    for name, text in sorted(texts.items()):
        for number, line in enumerate(text.splitlines(), 1):
            for pattern in (MACHINE_PATH, REGISTRY_HOST):
                if match := pattern.search(line):
                    yield f"{name}:{number} names {match.group()!r}"


def read_repository() -> dict[str, str]:
    """The text files of the project, by path; environments, caches and git's own left out."""
    folders = ("leyline", "tests", "scripts", "docs", "examples", ".ci")
    paths = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in folders:
        paths += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    texts: dict[str, str] = {}
    for path in paths:
        if "__pycache__" in path.parts or path.name.startswith(".coverage"):
            continue
        try:
            texts[str(path.relative_to(ROOT))] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a binary; its author looks after it
            continue
    return texts


@pytest.mark.parametrize(
    "rule",
    [
        placing_offences,
        mind_offences,
        direction_offences,
        environment_offences,
        size_offences,
        docstring_offences,
    ],
)
def test_the_package_keeps_the_rule(rule):
    assert list(rule(read_package())) == []


def test_no_file_names_a_machine_or_a_registry():
    texts = read_repository()
    assert {"pyproject.toml", "README.md", "tests/test_house.py", ".ci/run"} <= texts.keys()
    assert list(text_offences(texts)) == []


def test_the_mind_is_complete_once_there_is_an_engine():
    sources = read_package()
    if "leyline.engine" in sources:
        assert sources.keys() >= MIND


def test_pyproject_judges_exactly_the_mind():
    if sys.version_info < (3, 11):
        pytest.skip("tomllib comes with Python 3.11")
    import tomllib

    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    files = {name.replace(".", "/") + ".py" for name in MIND}
    assert set(tools["coverage"]["run"]["include"]) == files
    assert set(tools["pyright"]["strict"]) == files | {"leyline/errors.py"}


def package(**modules: str) -> dict[str, str]:
    """A synthetic package; `cache__ledger` names leyline.cache.ledger, `root` the package."""
    names = {key: "leyline." + key.replace("__", ".") for key in modules}
    names["root"] = "leyline"
    return {"leyline": ""} | {names[key]: text for key, text in modules.items()}


@pytest.mark.parametrize(
    "sources",
    [
        package(context="import torch"),
        package(context="import torch.nn.functional as F"),
        package(context="def late():\n    from triton import language"),
        package(context="if TYPE_CHECKING:\n    from torch import Tensor"),
        package(policy="from leyline.executor import Executor", executor=""),
        package(policy="from .executor import Executor", executor=""),
        package(policy="from leyline import executor", executor=""),
        package(policy="from . import executor", executor=""),
        package(cache__ledger="from .latent import LatentCache", cache="", cache__latent=""),
        package(cache__ledger="from ..model.rope import Rope", cache="", model="", model__rope=""),
        package(policy="import leyline.aside", aside="import leyline.deep", deep="import torch"),
        package(policy="from leyline.cache.radix import Tree", cache="import torch"),
        package(policy="from leyline import Engine"),
    ],
)
def test_a_mind_that_touches_tensors_is_caught(sources):
    assert list(mind_offences(sources))


def test_a_mind_that_keeps_to_itself_is_not():
    clean = package(
        root="from leyline.engine import Engine",
        engine="import torch",
        errors="",
        context="import numpy as np\nfrom leyline import errors\nfrom .errors import LeylineError",
        cache="",
        cache__radix="from ..context import Context\nfrom . import ledger",
        cache__ledger="import torchless_thing",
        executor="import torch\nfrom leyline.context import Context",
    )
    assert list(mind_offences(clean)) == []


def test_a_module_in_no_room_is_caught():
    placed = package(context="", cache="", cache__ledger="", model="", model__rope="", cli="")
    assert list(placing_offences(placed)) == []
    assert len(list(placing_offences(placed | package(utils="", cache__pool="")))) == 2


@pytest.mark.parametrize(
    "sources",
    [
        package(tokenizer="from transformers import AutoTokenizer"),
        package(engine="def load():\n    import pickle"),
        package(kernels__move="from leyline.context import Context", context="", kernels=""),
        package(kernels__move="from ..cache.latent import LatentCache", cache__latent=""),
        package(kernels__move="import leyline"),
        package(model__attention="from leyline.cache.latent import LatentCache"),
        package(model__attention="from ..cache import latent", cache="", cache__latent=""),
        package(server__worker="from leyline.scheduler import Scheduler"),
        package(server__worker="from leyline import executor", executor=""),
        package(server__app="from leyline.cache.prefix import PrefixCache"),
        package(server__app="import leyline.model.weights"),
    ],
)
def test_an_import_against_the_grain_is_caught(sources):
    assert list(direction_offences(sources))


def test_imports_with_the_grain_are_not():
    clean = package(
        errors="",
        kernels="",
        kernels__rope="",
        kernels__move="import torch\nfrom leyline.errors import LeylineError\nfrom . import rope",
        model="",
        model__attention="from leyline.kernels.move import move\nfrom ..errors import LeylineError",
        server="",
        server__app="from leyline.engine import Engine\nimport fastapi",
    )
    assert list(direction_offences(clean)) == []


@pytest.mark.parametrize(
    "text",
    [
        "import os\nhome = os.environ['HOME']",
        "import os\ndef f():\n    return os.getenv('HOME')",
        "from os import environ",
    ],
)
def test_a_room_that_reads_the_environment_is_caught(text):
    assert list(environment_offences(package(scheduler=text)))
    assert list(environment_offences(package(config=text))) == []


def test_a_long_module_and_a_long_function_are_caught():
    line = "x = 1\n"
    body = "    x = 1\n"
    assert list(size_offences(package(long=line * (MAX_MODULE_LINES + 1))))
    assert list(size_offences(package(fits=line * MAX_MODULE_LINES))) == []
    assert list(size_offences(package(long="def f():\n" + body * MAX_FUNCTION_LINES)))
    assert list(size_offences(package(fits="def f():\n" + body * (MAX_FUNCTION_LINES - 1)))) == []


@pytest.mark.parametrize(
    ("text", "complaints"),
    [
        ("def f(): ...", 2),
        ("'''Doc.'''\ndef f(): ...", 1),
        ("'''Doc.'''\nclass A:\n    '''Doc.'''\n    def f(self): ...", 1),
        ("'''Doc.'''\nclass A:\n    '''Doc.'''\n    async def f(self): ...", 1),
        ("'''Doc.'''\ndef _f(): ...\nclass _A: ...", 0),
        ("'''Doc.'''\nclass A:\n    '''Doc.'''\n    @x.setter\n    def x(self, y): ...", 0),
        ("'''Doc.'''\ndef f():\n    '''Doc.'''\n    def inner(): ...", 0),
    ],
)
def test_a_public_name_without_words_is_caught(text, complaints):
    assert len(list(docstring_offences({"leyline.x": text}))) == complaints


@pytest.mark.parametrize(
    ("text", "complaints"),
    [
        ("cache = '/" + "root/.cache'", 1),
        ("see /" + "home/ada/leyline", 1),
        ("pip install -i https://" + "pypi" + ".org/simple leyline", 1),
        ("a wheel from download" + ".pytorch" + ".org", 1),
        ("POST /v1/directives; tests/model/test_rope.py; ~/.cache; docs/work/log.md", 0),
        ("https://example.com/home/page", 0),
    ],
)
def test_a_machine_path_or_a_registry_is_caught(text, complaints):
    assert len(list(text_offences({"README.md": text}))) == complaints
