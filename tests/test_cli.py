"""The command line: flags from the dataclasses, exit codes, one-line errors."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from leyline import EngineConfig, __version__
from leyline.cli import DOCTOR_FLAGS, SAMPLING_HELP, main
from leyline.errors import LeylineError
from leyline.server.settings import ServerConfig
from tests.llama_models import llama_model

Folder = Callable[[str], Path]
Output = pytest.CaptureFixture[str]


def run(*arguments: str) -> int:
    """The exit code, whether argparse gives it or we do."""
    try:
        return main(arguments)
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code


def small(folder: Path) -> list[str]:
    return ["--model", str(folder), "--no-progress", "--kv-cache-tokens", "300"]


def one_line(output: Output) -> str:
    """What stands on standard error: a single line of ours, no traceback."""
    err = output.readouterr().err
    assert err.startswith("leyline: ") and err.count("\n") == 1
    return err


def test_help_names_the_commands(capsys: Output) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    for command in ("serve", "chat", "generate", "doctor", "convert"):
        assert f"leyline {command}" in text


def test_version(capsys: Output) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"leyline {__version__}\n"


@pytest.mark.parametrize("command", ["serve", "chat", "generate"])
def test_every_option_is_a_flag_with_its_help_and_default(command: str, capsys: Output) -> None:
    assert run(command, "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    configs = (EngineConfig, ServerConfig) if command == "serve" else (EngineConfig,)
    for entry in (entry for config in configs for entry in fields(config)):
        assert f"--{entry.name.replace('_', '-')}" in text
        assert " ".join(entry.metadata["help"].split()) in text
        if type(entry.default) in (int, float):
            assert f"(default: {entry.default})" in text
    if command != "serve":
        for name in SAMPLING_HELP:
            assert f"--{name.replace('_', '-')}" in text


@pytest.mark.parametrize("command", ["serve", "doctor", "convert"])
def test_help_needs_no_tensor_library(command: str) -> None:
    code = f"import sys, leyline.cli as c\ntry: c.main(['{command}', '--help'])\n"
    code += "except SystemExit: pass\nsys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0


def test_the_doctor_takes_what_matters_to_it(capsys: Output) -> None:
    assert run("doctor", "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    for entry in fields(EngineConfig):
        flag, said = f"--{entry.name.replace('_', '-')} ", " ".join(entry.metadata["help"].split())
        if entry.name in DOCTOR_FLAGS:
            assert said in text
        else:
            assert flag not in text and said not in text
    assert "deepseek-v2-lite" in text and "--json" in text


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["dance"],
        ["serve", "--heat", "1"],
        ["serve", "--port", "many"],
        ["serve", "--dtype", "int4"],
        ["generate"],
        ["generate", "a", "--top-k", "1.5"],
        ["doctor", "--preset", "deepseek-v9"],
        ["doctor", "a", "b"],
        ["convert"],
        ["convert", "a"],
        ["convert", "a", "b", "--dtype", "int4"],
    ],
)
def test_wrong_flags_end_with_2(arguments: list[str], capsys: Output) -> None:
    assert run(*arguments) == 2
    assert "usage: leyline" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "a", "--temperature", "-1"], "temperature"),
        (["generate", "a", "--top-p", "0"], "top_p"),
        (["chat", "--max-tokens", "0"], "max_tokens"),
        (["generate", "a", "--max-num-seqs", "0"], "max_num_seqs"),
        (["serve", "--session-ttl-s", "-1"], "session_ttl_s"),
        (["serve", "--port", "-1"], "port"),
        (["serve", "a", "--model", "b"], "Two models"),
        (["doctor", "a", "--model", "b"], "Two models"),
        (["doctor", "a", "--preset", "glm-4.7-flash"], "preset"),
        (["doctor", "--preset", "glm-4.7-flash", "--max-model-len", "999999"], "max_model_len"),
    ],
)
def test_values_out_of_range_end_with_2_and_one_line(
    arguments: list[str], said: str, capsys: Output
) -> None:
    assert run(*arguments) == 2
    assert said in one_line(capsys)


@pytest.mark.parametrize(
    "command", [["serve", "--port", "0"], ["chat"], ["generate", "a"], ["doctor"]]
)
def test_an_unknown_folder_ends_with_1_and_one_line(command: list[str], capsys: Output) -> None:
    assert run(*command, "--model", "no/such/folder") == 1
    assert "no/such/folder" in one_line(capsys)


def test_an_empty_folder_ends_with_1_and_one_line(tmp_path: Path, capsys: Output) -> None:
    assert run("generate", "a", "--model", str(tmp_path)) == 1
    one_line(capsys)


def test_generate_prints_the_text(tiny_folder: Folder, capsys: Output) -> None:
    flags = [*small(tiny_folder("v3")), "--temperature", "0", "--max-tokens", "6"]
    assert run("generate", "in the land", *flags) == 0
    first = capsys.readouterr().out
    assert len(first) > 3 and first.endswith("\n")
    assert run("generate", "in the land", *flags) == 0
    assert capsys.readouterr().out == first


def test_generate_reads_standard_input(
    tiny_folder: Folder, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*small(tiny_folder("v3")), "--temperature", "0", "--max-tokens", "6"]
    run("generate", "in the land", *flags)
    expected = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO("in the land"))
    assert run("generate", "-", *flags) == 0
    assert capsys.readouterr().out == expected


def test_a_prompt_that_is_too_long_ends_with_2(tiny_folder: Folder, capsys: Output) -> None:
    assert run("generate", "x" * 400, *small(tiny_folder("v3"))) == 2
    assert "300 tokens" in one_line(capsys)


def test_chat_answers_line_by_line_and_survives_a_refusal(
    tiny_folder: Folder, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["hello", "  ", "x" * 400, "and?"])
    prompts: list[str] = []

    def ask(prompt: str = "") -> str:
        prompts.append(prompt)
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", ask)
    assert run("chat", *small(tiny_folder("v3")), "--max-tokens", "5") == 0
    output = capsys.readouterr()
    assert len(prompts) == 5
    assert output.err.count("leyline: ") == 1 and "300 tokens" in output.err
    assert "Ctrl-D" in output.out


def test_an_interrupt_is_a_clean_end(monkeypatch: pytest.MonkeyPatch, tiny_folder: Folder) -> None:
    def interrupt(prompt: str = "") -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupt)
    assert run("chat", *small(tiny_folder("v3"))) == 0


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What `leyline serve` hands to the server."""
    calls: list[Any] = []

    def serve(load: Any, config: ServerConfig, on_ready: Callable[[str], None]) -> None:
        with load() as engine:
            calls.append((engine.config, config))
            on_ready("http://here:1")

    monkeypatch.setattr("leyline.server.listen.serve_loading", serve)
    monkeypatch.setattr("leyline.server.logs.configure", lambda level: calls.append(level))
    yield calls


def test_serve_passes_its_flags_on_and_says_what_to_try(
    tiny_folder: Folder, capsys: Output, served: list[Any]
) -> None:
    assert run("serve", *small(tiny_folder("v3")), "--port", "0", "--max-num-seqs", "3") == 0
    level, (engine, server) = served
    assert level == "info"
    assert (engine.max_num_seqs, engine.kv_cache_tokens, engine.progress) == (3, 300, False)
    assert server.port == 0
    out = capsys.readouterr().out
    assert "http://here:1" in out and "curl http://here:1/v1/chat/completions" in out


def test_serve_takes_the_model_by_its_place_too(
    tiny_folder: Folder, capsys: Output, served: list[Any]
) -> None:
    name, *flags = small(tiny_folder("v3"))[1:]
    assert run("serve", name, *flags, "--port", "0") == 0
    assert run("serve", "--port", "0", *flags, "--model", name, name) == 0
    assert [engine.model for engine, _ in served[1::2]] == [name, name]


def test_serve_takes_flags_again_and_options_from_the_environment(
    tiny_folder: Folder,
    capsys: Output,
    served: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = small(tiny_folder("v3"))[1]
    for name, value in (
        ("LEYLINE_MODEL", folder),
        ("LEYLINE_PORT", "0"),
        ("LEYLINE_KV_CACHE_TOKENS", "300"),
        ("LEYLINE_MAX_NUM_SEQS", "7"),
        ("LEYLINE_PROGRESS", "no"),
        ("LEYLINE_SHUTDOWN_TIMEOUT", "1.5"),
        ("LEYLINE_SESSION_TTL_S", "9"),
        ("LEYLINE_ALLOWED_HOSTS", "a.example b.example"),
        ("LEYLINE_UDS", ""),
    ):
        monkeypatch.setenv(name, value)
    keys = ["--api-key", "k1", "--api-key", "k2"]
    assert run("serve", *keys, "--max-num-seqs", "3", "--log-level", "error") == 0
    level, (engine, server) = served
    assert (level, engine.model, engine.max_num_seqs, engine.progress) == (
        "error",
        folder,
        3,
        False,
    )
    assert (server.api_key, server.port, server.shutdown_timeout_s) == (("k1", "k2"), 0, 1.5)
    assert engine.session_ttl_s == 9
    assert (server.allowed_hosts, server.uds) == (("a.example", "b.example"), "")
    assert "Authorization: Bearer KEY" in capsys.readouterr().out
    assert run("serve", folder, "--shutdown-timeout", "4") == 0  # as it is called elsewhere
    assert served[-1][1].shutdown_timeout_s == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "eighty"),
        ("METRICS", "maybe"),
        ("SESSION_TTL_S", "soon"),
        ("API_KEY", ""),
        ("API_KEY", " "),
        ("API_KEY_FILE", ""),
        ("SSL_KEYFILE", ""),
        ("SSL_CERTFILE", ""),
        ("DTYPE", "int4"),
        ("TOOL_CALL_PARSER", "glm48"),
        ("REASONING_PARSER", "glm48"),
    ],
)
def test_a_wrong_variable_ends_with_2_and_one_line_that_names_it(
    name: str, value: str, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"LEYLINE_{name}", value)
    assert run("serve") == 2
    assert name.lower() in one_line(capsys).lower()


def test_a_misspelt_variable_is_told_of_and_a_known_one_is_not(
    tiny_folder: Folder,
    served: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("LEYLINE_API_KEYS", "secret")
    monkeypatch.setenv("LEYLINE_SHUTDOWN_TIMEOUT_S", "3")
    monkeypatch.setenv("LEYLINE_HOME", os.environ.get("LEYLINE_HOME", "/nowhere"))
    with caplog.at_level("WARNING"):
        assert run("serve", *small(tiny_folder("v3"))) == 0
    told = [record.getMessage() for record in caplog.records if record.name == "leyline.cli"]
    assert len(told) == 1 and "'LEYLINE_API_KEYS'" in told[0] and "secret" not in told[0]


def test_the_doctor_tells_people_and_programs(tiny_folder: Folder, capsys: Output) -> None:
    folder = str(tiny_folder("v3"))
    assert run("doctor", "--preset", "glm-4.7-flash") == 0
    text = capsys.readouterr().out
    assert "54,144 bytes a token" in text and "60,160" in text and "29.943 B" in text
    assert run("doctor", folder, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["model"] == Path(folder).name and told["weights"]["is_complete"]
    assert run("doctor", "--model", folder, "--json", "--kv-cache-tokens", "77") == 0
    assert json.loads(capsys.readouterr().out)["cache"]["tokens"] == 77


def test_convert_makes_a_folder_and_says_what_to_do_with_it(tmp_path: Path, capsys: Output) -> None:
    llama_model("llama-gqa", tmp_path / "llama")
    target = str(tmp_path / "a model")
    assert run("convert", str(tmp_path / "llama"), target, "--no-progress") == 0
    out = capsys.readouterr().out
    assert "Largest logit difference" in out and f"leyline serve '{target}'" in out
    assert run("doctor", target) == 0
    assert "Llama family" in capsys.readouterr().out
    flags = ["--no-progress", "--kv-cache-tokens", "300", "--max-tokens", "4"]
    assert run("generate", "in the land", "--model", target, *flags) == 0
    assert capsys.readouterr().out
    assert run("convert", str(tmp_path / "llama"), target, "--no-progress") == 2
    assert "not an empty folder" in one_line(capsys)
    assert run("convert", str(tmp_path / "none"), str(tmp_path / "b"), "--no-progress") == 1
    assert "There is no" in one_line(capsys)


def test_an_error_of_several_lines_becomes_one(
    monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise LeylineError("first\n  second")

    monkeypatch.setattr("leyline.engine.Engine", fail)
    assert run("generate", "a") == 1
    assert one_line(capsys) == "leyline: first second\n"


@pytest.mark.parametrize("kind", [OSError, OverflowError, ZeroDivisionError, KeyError, MemoryError])
def test_what_nothing_foresaw_is_one_line_too(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    def broken(*_: Any) -> None:
        raise kind("odd\nthing")

    monkeypatch.setattr("leyline.doctor.diagnose", broken)
    assert run("doctor", "some-model") == 1
    line = one_line(capsys)
    assert kind.__name__ in line and "some-model" in line
