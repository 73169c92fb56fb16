"""Every example of the documentation runs as it stands and does what the text beside it says.

A document is a story: its blocks run in order. `bash` blocks run in a shell against a real server
that the document's own `leyline serve` line starts; only the address is replaced. A `json` block
behind one shows part of the answers. `python` blocks share one namespace; `print(...)  # text`
says what is printed. In both a number with a fraction is a measurement, which is only a number
anywhere else, and a text that ends in three dots goes on.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import leyline.errors
from leyline import LeylineError

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("docs/directives.md", "README.md")
ADDRESS = "http://127.0.0.1:8000"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SAID = re.compile(r"^\s*print\(.*\)  # (.*)$")
FRACTION = re.compile(r"\d+\.\d+")
# One thread each: several on few cores, beside other processes, wait for one another.
SERVER_FLAGS = "--port 0 --no-progress --num-threads 1"
# For a machine without curl: a stand-in that knows the options that the documents use.
CURL = f"""#!{sys.executable}
import sys, urllib.error, urllib.request
words, headers, method, body, url = iter(sys.argv[1:]), {{}}, None, None, None
for word in words:
    if word == "-H":
        name, _, value = next(words).partition(":")
        headers[name] = value.strip()
    elif word == "-X":
        method = next(words)
    elif word == "-d":
        body = next(words).encode()
    elif word != "-s":
        url = word
request = urllib.request.Request(url, body, headers, method=method)
try:
    answer = urllib.request.urlopen(request)
except urllib.error.HTTPError as error:
    answer = error
sys.stdout.buffer.write(answer.read())
"""


# Reading a document ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A fenced block, and the line of the document on which its text begins."""

    language: str
    text: str
    line: int


def blocks_of(markdown: str) -> list[Block]:
    return [
        Block(found[1], found[2], markdown.count("\n", 0, found.start(2)) + 1)
        for found in FENCE.finditer(markdown)
    ]


def read(document: str) -> list[Block]:
    return blocks_of((ROOT / document).read_text(encoding="utf-8"))


def values_of(text: str) -> list[Any]:
    """The JSON values of a text, which may stand close together."""
    decoder, values, at = json.JSONDecoder(), [], 0
    while at < len(text := text.rstrip()):
        at += len(text[at:]) - len(text[at:].lstrip())
        value, at = decoder.raw_decode(text, at)
        values.append(value)
    return values


# Comparing ------------------------------------------------------------------------------------


def differences(shown: Any, got: Any, path: str = "") -> Iterator[str]:
    """What a document shows that an answer does not have."""
    if isinstance(shown, dict) and isinstance(got, dict):
        for name, value in shown.items():
            yield from differences(value, got.get(name, "(nothing)"), f"{path}.{name}")
    elif isinstance(shown, list) and isinstance(got, list) and len(shown) == len(got):
        for index, (value, other) in enumerate(zip(shown, got, strict=True)):
            yield from differences(value, other, f"{path}[{index}]")
    elif not same(shown, got):
        yield f"{path or 'the answer'}: {got!r}, shown as {shown!r}"


def same(shown: Any, got: Any) -> bool:
    """Whether a single value is what is shown."""
    if type(shown) is not type(got):
        return False
    if isinstance(shown, str) and shown.endswith("..."):
        return got.startswith(shown[:-3])
    return isinstance(shown, float) or shown == got


def said_otherwise(shown: str, printed: str) -> bool:
    """Whether a line that was printed is not the one that is shown, its fractions apart."""
    masked = [FRACTION.sub("0.0", line) for line in (shown, printed)]
    return not same(*masked)


# Running --------------------------------------------------------------------------------------


@dataclass
class Server:
    """The server that a document has started last; its files lie in `folder`."""

    folder: Path
    url: str = ""
    process: subprocess.Popen[str] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The commands that a reader has: `leyline`, and a `curl` that asks no proxy."""
        places = [str(self.folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
        return {**os.environ, "PATH": os.pathsep.join(places), "no_proxy": "*"}

    def start(self, command: str = "leyline serve") -> None:
        """Start it with the document's own words, in the place of the one before."""
        self.stop()
        self.process = subprocess.Popen(
            ["bash", "-c", f"exec env {command.strip()} {SERVER_FLAGS}"],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        ready = next((line for line in self.process.stdout if "ready at" in line), None)
        assert ready, f"{command} did not become ready"
        self.url = ready.split()[-1]

    def stop(self) -> None:
        """End it as its operator would, and see that it ends well."""
        if self.process is not None:
            process, self.process = self.process, None
            process.terminate()
            try:
                process.communicate(timeout=60)
            finally:
                process.kill()
            assert process.returncode == 0

    def shell(self, script: str) -> str:
        """Run a script that talks to it; what the script writes."""
        if self.process is None:
            self.start()
        ran = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script.replace(ADDRESS, self.url)],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
            timeout=60,
            check=True,
        )
        return ran.stdout


@dataclass(frozen=True)
class Exchange:
    """What a document shows of some answers, and these answers."""

    where: str
    shown: Any
    got: Any

    @property
    def complaints(self) -> list[str]:
        return [f"{self.where}: {what}" for what in differences(self.shown, self.got)]


@dataclass
class Printed:
    """The prints of Python blocks: where, what is shown of them and what was printed."""

    lines: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def complaints(self) -> list[str]:
        wrong = [line for line in self.lines if said_otherwise(*line[1:])]
        return [
            f"{where}: printed {printed!r}, shown as {shown!r}" for where, shown, printed in wrong
        ]


def is_file(block: Block) -> bool:
    """Whether a block is a file of the reader's own, named in its first line."""
    return re.match(r"# \w+\.py\n", block.text) is not None


def save(block: Block, folder: Path) -> None:
    (folder / block.text.split()[1]).write_text(block.text, encoding="utf-8")


def run_bash(document: str, server: Server) -> list[Exchange]:
    """Run the curls of a document; the answers that it shows something of."""
    exchanges, output = list[Exchange](), ""
    for block in read(document):
        if is_file(block):
            save(block, server.folder)
        elif block.language == "bash" and "leyline serve" in block.text:
            server.start(block.text)
        elif block.language == "bash":
            output = server.shell(block.text)
        elif block.language == "json":
            shown, got = values_of(block.text), values_of(output)
            exchanges.append(Exchange(f"{document}:{block.line}", shown, got))
    return exchanges


def run_python(document: str, folder: Path) -> Printed:
    """Run the Python of a document, each block as if typed behind the one before."""
    printed, namespace = Printed(), {"__name__": "__main__"}
    for block in read(document):
        if is_file(block):
            save(block, folder)
        elif block.language == "python":
            run_block(f"{document}:{block.line}", block.text, namespace, printed)
    return printed


def run_block(where: str, text: str, namespace: dict[str, Any], printed: Printed) -> None:
    said: dict[int, str] = {}

    def note(*values: object) -> None:
        said[sys._getframe(1).f_lineno] = " ".join(map(str, values))

    namespace["print"] = note
    exec(compile(text, where, "exec"), namespace)
    for number, line in enumerate(text.splitlines(), 1):
        if shown := SAID.match(line):
            printed.lines.append(
                (f"{where} + {number - 1}", shown[1], said.get(number, "(nothing)"))
            )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("docs"))
    (server.folder / "bin").mkdir()
    if shutil.which("curl") is None:
        write_curl(server.folder / "bin")
    yield server
    server.stop()


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def write_curl(folder: Path) -> None:
    (folder / "curl").write_text(CURL, encoding="utf-8")
    (folder / "curl").chmod(0o755)


@pytest.fixture(scope="module")
def exchanges(server: Server) -> Callable[[str], list[Exchange]]:
    """The answers to the curls of a document, which are run once."""
    ran: dict[str, list[Exchange]] = {}

    def of(document: str) -> list[Exchange]:
        if document not in ran:
            ran[document] = run_bash(document, server)
        return ran[document]

    return of


# The examples ---------------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_curl_gets_what_is_shown(
    document: str, exchanges: Callable[[str], list[Exchange]]
) -> None:
    found = exchanges(document)
    assert found
    assert not [what for exchange in found for what in exchange.complaints]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_an_excerpt_that_shows_anything_else_is_noticed(
    document: str, exchanges: Callable[[str], list[Exchange]]
) -> None:
    """The twin: every single value that is shown is changed, and must then not be the answer's."""
    num_changed = 0
    for exchange in exchanges(document):
        for changed in changed_once(exchange.shown):
            assert list(differences(changed, exchange.got)), f"{exchange.where}: {changed}"
            num_changed += 1
    assert num_changed > 10


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_python_block_prints_what_is_shown(
    document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    printed = run_python(document, tmp_path)
    assert printed.lines
    assert not printed.complaints
    for where, shown, said in printed.lines:  # the twin
        assert said_otherwise(shown + "1", said), where


def changed_once(shown: Any) -> Iterator[Any]:
    """Copies of what is shown in which one value is another."""
    if isinstance(shown, dict | list):
        for key in list(shown) if isinstance(shown, dict) else range(len(shown)):
            for changed in changed_once(shown[key]):
                copied = copy.copy(shown)
                copied[key] = changed
                yield copied
    elif isinstance(shown, float):
        yield None
    else:
        yield "x" + shown if isinstance(shown, str) else not shown if shown is None else shown + 1


# What the examples rest on --------------------------------------------------------------------


def test_blocks_are_found_with_their_lines() -> None:
    found = blocks_of(
        "text\n\n```bash\necho 1\n```\n\n```\nno language\n```\n```json\n{}\n[1]\n```\n"
    )
    assert [(block.language, block.line) for block in found] == [("bash", 4), ("json", 11)]
    assert values_of(found[1].text) == [{}, [1]]
    assert values_of('{"a": 1}{"b": 2} \n') == [{"a": 1}, {"b": 2}]


@pytest.mark.parametrize(
    ("shown", "got"),
    [
        ({"a": 1}, {"a": 1, "b": 2}),
        ([{"a": None}], [{"a": None, "b": 2}]),
        ({"id": "mark-..."}, {"id": "mark-12"}),
        ({"ms": 1.5}, {"ms": 20.25}),
    ],
)
def test_an_excerpt_is_a_part_of_an_answer(shown: Any, got: Any) -> None:
    assert not list(differences(shown, got))


@pytest.mark.parametrize(
    ("shown", "got"),
    [
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": 1}, {"b": 1}),
        ({"a": None}, {}),
        ([1], [1, 2]),
        ({"ms": 1.5}, {"ms": None}),
        ({"id": "mark-..."}, {"id": "market"}),
        ([], {}),
    ],
)
def test_an_excerpt_that_is_no_part_of_an_answer_is_noticed(shown: Any, got: Any) -> None:
    assert list(differences(shown, got))


def test_what_a_block_prints_is_compared_line_by_line() -> None:
    printed = Printed()
    text = "x = 2\nprint(x)  # 2\nprint(x + 1)  # 4\nif not x:\n    print(x)  # 0\n"
    run_block("here", text, {}, printed)
    assert [(shown, said) for _, shown, said in printed.lines] == [
        ("2", "2"),
        ("4", "3"),
        ("0", "(nothing)"),
    ]
    assert len(printed.complaints) == 2


def test_the_stand_in_for_curl_does_what_the_documents_ask_of_curl(
    tmp_path: Path, exchanges: Callable[[str], list[Exchange]], server: Server
) -> None:
    exchanges(DOCUMENTS[0])
    write_curl(tmp_path)
    scripts = [block.text for block in read(DOCUMENTS[0]) if 'expected_version": 2' in block.text]
    first_in_path = f"PATH={shlex.quote(str(tmp_path))}:$PATH\n"
    (answer,) = values_of(server.shell(first_in_path + scripts[0]))
    assert answer["error"]["code"] == "session_not_found"


def test_the_table_of_status_codes_is_that_of_the_errors() -> None:
    text = (ROOT / DOCUMENTS[0]).read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d{3}) \| `(\w+)` \|", text, re.MULTILINE)
    told = {code: int(status) for status, code in rows}
    kinds = [kind for kind in vars(leyline.errors).values() if is_error(kind)]
    # A model folder is refused before there is a server; values are refused by the server alone.
    known = {kind.code: kind.status for kind in kinds if kind.code != "model_error"}
    assert told == {**known, "unsupported_value": 400}


def is_error(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, LeylineError)


def test_links_between_documents_lead_somewhere() -> None:
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")):
        for link in re.findall(r"\]\(([^)]+)\)", path.read_text(encoding="utf-8")):
            file, _, heading = link.partition("#")
            if "://" in file:
                continue
            target = (path.parent / file) if file else path
            assert target.exists(), link
            if heading:
                assert heading in anchors(target), link


def anchors(path: Path) -> set[str]:
    """The names of a document's headings in links."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {heading.lower().replace(" ", "-") for heading in headings}
