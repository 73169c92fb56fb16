"""The command line: `leyline serve | chat | generate | doctor | convert`.

Every flag of the engine or the server is a field of `EngineConfig` or `ServerConfig`, with that
field's help text; nothing is said twice. Exit codes: 0 after a clean end, 1 if the model or the
server could not start, or a model not be told about or converted, 2 for wrong flags.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from functools import partial
from typing import Any

from leyline import __version__
from leyline.config import EngineConfig
from leyline.errors import ConfigError, InvalidRequestError, LeylineError
from leyline.sampling import SamplingParams
from leyline.server.environment import options_in, plain_type, unknown_in
from leyline.server.settings import ServerConfig

logger = logging.getLogger(__name__)

DESCRIPTION = """\
Serve a model with multi-head latent attention and edit its cached context.

  leyline serve                     serve the embedded SmolLM2-135M-Instruct on port 8000
  leyline serve MODEL               serve a model: a folder, or its id on the hub
  leyline chat                      talk to the model in this terminal
  leyline generate "Once upon"      continue a text
  leyline doctor MODEL              tell what would happen, without loading it
  leyline convert LLAMA FOLDER      rewrite a llama exactly as a model with latent attention
"""
# The hub library's HTTP client logs every request, signed addresses of downloads included.
CHATTY = ("httpx", "httpx2")
# What a broken model may raise where no check foresaw it.
UNFORESEEN = (
    OSError,
    OverflowError,
    ValueError,
    ZeroDivisionError,
    TypeError,
    LookupError,
    MemoryError,
)
SERVE_EPILOG = (
    "Each flag may be given in the environment too: LEYLINE_PORT for --port, and so on, with "
    "spaces between values of a flag that may be given again. Flags win."
)
MODEL_HELP = "The model, as with --model."
# What of the engine matters to a model that is only looked at.
DOCTOR_FLAGS = (
    "model",
    "dtype",
    "device",
    "max_model_len",
    "kv_cache_tokens",
    "kv_rope_dtype",
    "revision",
    "download_dir",
    "progress",
)
CONVERT_DTYPES = ("auto", "float32", "float16", "bfloat16")
SAMPLING_HELP = {
    "temperature": "Randomness; 0 always takes the most likely token.",
    "top_p": "Keep the smallest set of tokens whose probability reaches this.",
    "top_k": "Keep this many most likely tokens; 0 keeps all.",
    "max_tokens": "Tokens to generate at most; the default is what the window leaves.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        return arguments.run(arguments)
    except (ConfigError, InvalidRequestError) as error:
        return _complain(error, 2)
    except LeylineError as error:
        return _complain(error, 1)
    except (KeyboardInterrupt, BrokenPipeError):
        return 0
    except UNFORESEEN as error:
        logger.debug("unforeseen", exc_info=error)
        return _complain(LeylineError(_unforeseen(arguments, error)), 1)


def _unforeseen(arguments: argparse.Namespace, error: Exception) -> str:
    """What is said of an error that nothing further in had a message for."""
    given = vars(arguments)
    names = (given.get(name) for name in ("source", "named", "model", "preset"))
    model = next((name for name in names if name), "the embedded model")
    return f"{type(error).__name__} with {model}: {str(error)[:300]}"


def _complain(error: LeylineError, code: int) -> int:
    """One line on standard error."""
    print(f"leyline: {' '.join(error.message.split())}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="leyline",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"leyline {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = _command(commands, "serve", "serve the model over HTTP", _serve)
    serve.epilog = SERVE_EPILOG
    _add_flags(serve, ServerConfig)
    _add_model(serve)
    chat = _command(commands, "chat", "talk to the model in this terminal", _chat)
    _add_sampling(chat)
    generate = _command(commands, "generate", "continue a text", _generate)
    generate.add_argument("prompt", help="Text to continue; - reads it from standard input.")
    _add_sampling(generate)
    _add_doctor(commands)
    _add_convert(commands)
    return parser


def _add_doctor(commands: Any) -> None:
    from leyline.model.presets import HUB_IDS

    doctor = _subparser(commands, "doctor", "tell what would happen, without loading it", _doctor)
    _add_model(doctor)
    _add_flags(doctor, EngineConfig, DOCTOR_FLAGS)
    doctor.add_argument(
        "--preset",
        choices=tuple(HUB_IDS),
        default=argparse.SUPPRESS,
        help="A known model, in place of a folder or hub id.",
    )
    doctor.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="Print JSON."
    )


def _add_convert(commands: Any) -> None:
    summary = "rewrite a llama exactly as a model with latent attention"
    convert = _subparser(commands, "convert", summary, _convert)
    convert.add_argument(
        "source", metavar="LLAMA", help="A GGUF file, a folder of safetensors, or a hub id."
    )
    convert.add_argument("target", metavar="FOLDER", help="The model folder to make.")
    convert.add_argument(
        "--dtype",
        dest="written_dtype",  # the engine's own is of fewer kinds
        choices=CONVERT_DTYPES,
        default="auto",
        help="Dtype to write; auto keeps the source's, and writes float32 for a quantised GGUF.",
    )
    _add_flags(convert, EngineConfig, ("revision", "download_dir", "progress"))


def _command(
    commands: Any, name: str, summary: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """A subcommand with the engine's flags."""
    command = _subparser(commands, name, summary, run)
    _add_flags(command, EngineConfig)
    return command


def _subparser(
    commands: Any, name: str, summary: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.set_defaults(run=run)
    return command


def _add_model(parser: argparse.ArgumentParser) -> None:
    """The model by its place, for who is used to that."""
    parser.add_argument(
        "named", nargs="?", metavar="MODEL", help=MODEL_HELP, default=argparse.SUPPRESS
    )


def _add_flags(
    parser: argparse.ArgumentParser, config: type, names: Sequence[str] | None = None
) -> None:
    """One flag a field of a config dataclass, or of those named."""
    hints = typing.get_type_hints(config)
    for entry in fields(config):
        if names is None or entry.name in names:
            _add_flag(parser, entry, hints[entry.name])


def _add_flag(parser: argparse.ArgumentParser, entry: Field[Any], hint: Any) -> None:
    """A flag that leaves nothing behind unless it is given, so that defaults stay in one place."""
    default = None if entry.default is MISSING else entry.default
    help_text = entry.metadata["help"].replace("%", "%%")
    if default not in (None, "", ()):
        help_text += f" (default: {default})"
    options: dict[str, Any] = {"help": help_text, "default": argparse.SUPPRESS}
    if hint is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif typing.get_origin(hint) is tuple:
        options |= {"action": "append", "metavar": "STR"}
    else:
        options["type"] = plain_type(hint)
        options["metavar"] = plain_type(hint).__name__.upper()
        if entry.metadata.get("choices"):
            options |= {"choices": entry.metadata["choices"], "metavar": None}
    if hint is not bool:
        options["dest"] = entry.name
    parser.add_argument(*_flags(entry.name), **options)


def _flags(name: str) -> list[str]:
    """How a field is spelled as a flag; seconds may be left unsaid, as other servers have it."""
    flag = f"--{name.replace('_', '-')}"
    return [flag.removesuffix("-s"), flag] if flag.endswith("-s") else [flag]


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    """The sampling flags of the commands that answer in the terminal."""
    hints = typing.get_type_hints(SamplingParams)
    for name, help_text in SAMPLING_HELP.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=plain_type(hints[name]),
            metavar=plain_type(hints[name]).__name__.upper(),
            help=help_text,
            default=argparse.SUPPRESS,
        )


def _config(kind: type, arguments: argparse.Namespace) -> Any:
    """A config from those of its flags that were given."""
    given = dict(vars(arguments))
    if "named" in given and given.setdefault("model", given["named"]) != given["named"]:
        raise ConfigError("Two models are named; name one.", param="model")
    values = {entry.name: given[entry.name] for entry in fields(kind) if entry.name in given}
    return kind(**{name: _frozen(value) for name, value in values.items()})


def _frozen(value: Any) -> Any:
    """What a flag that may be given again was given, as configs hold it."""
    return tuple(value) if isinstance(value, list) else value


def _sampling(arguments: argparse.Namespace) -> SamplingParams:
    """Sampling parameters from those flags that were given."""
    given = vars(arguments)
    return SamplingParams(**{name: given[name] for name in SAMPLING_HELP if name in given})


def _serve(arguments: argparse.Namespace) -> int:
    _from_environment(arguments)
    config = _config(ServerConfig, arguments)
    engine_config = _config(EngineConfig, arguments)
    from leyline.server import logs
    from leyline.server.failures import quoted
    from leyline.server.listen import serve_loading

    logs.configure(config.log_level)
    for name in unknown_in(os.environ, EngineConfig, ServerConfig):
        logger.warning("The variable %s is no option and is ignored; see --help.", quoted(name))
    serve_loading(partial(_engine, engine_config), config, on_ready=partial(_ready, config))
    return 0


def _engine(config: EngineConfig) -> Any:
    """Load an engine."""
    from leyline.engine import Engine

    return Engine(config)


def _from_environment(arguments: argparse.Namespace) -> None:
    """Take options that no flag gives from the environment; a model by its place is a flag too."""
    for name, value in options_in(os.environ, EngineConfig, ServerConfig).items():
        if name != "model" or "named" not in arguments:
            vars(arguments).setdefault(name, value)


def _doctor(arguments: argparse.Namespace) -> int:
    config = _config(EngineConfig, arguments)
    given = vars(arguments)
    if "preset" in given and config.model:
        raise ConfigError("A model and a preset are named; name one.", param="preset")
    from leyline.doctor import diagnose

    diagnosis = diagnose(config, given.get("preset", ""))
    print(diagnosis.to_json() if "json" in given else diagnosis)
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    config = _config(EngineConfig, arguments)
    from leyline.convert import convert

    done = convert(
        arguments.source,
        arguments.target,
        dtype=arguments.written_dtype,
        revision=config.revision,
        download_dir=config.download_dir,
        progress=config.progress,
    )
    print(f"{done}\nTry:\n  leyline serve {shlex.quote(str(done.folder))}")
    return 0


def _ready(config: ServerConfig, url: str) -> None:
    """Say where the server is and what to try."""
    body = '{"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
    key = " -H 'Authorization: Bearer KEY'" if config.api_key or config.api_key_file else ""
    place = f"--unix-socket {config.uds} http://localhost" if config.uds else url
    headers = f"-H 'Content-Type: application/json'{key}"
    print(
        f"\nLeyline is ready at {url}\nTry:\n"
        f"  curl {place}/v1/chat/completions {headers} -d '{body}'\n",
        flush=True,
    )


def _chat(arguments: argparse.Namespace) -> int:
    params = _sampling(arguments)
    from leyline.engine import Engine

    with Engine(_config(EngineConfig, arguments)) as engine:
        conversation = engine.session()
        print(f"{engine.model_name}: end with Ctrl-D.")
        while (content := _ask()) is not None:
            if content.strip():
                _show(conversation.stream(content, params))
    return 0


def _ask() -> str | None:
    """What the user types; None at the end."""
    try:
        return input("> ")
    except EOFError:
        print()
        return None


def _show(pieces: typing.Iterable[str]) -> None:
    """Print an answer as it comes; one that fails does not end the chat."""
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
    except LeylineError as error:
        _complain(error, 0)


def _generate(arguments: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    params = _sampling(arguments)
    from leyline.engine import Engine

    with Engine(_config(EngineConfig, arguments)) as engine:
        print(engine.generate(prompt, params).text)
    return 0
