"""What a model folder says about its tokenizer, beside the vocabulary itself.

| wanted | looked for in, in this order |
|---|---|
| chat template | `chat_template.jinja`, `tokenizer_config.json` |
| template where tools are given | `additional_chat_templates/tool_use.jinja`, the "tool_use" one |
| special tokens' texts | `tokenizer_config.json`, `special_tokens_map.json` |
| stop ids | the sum of `generation_config.json`, `config.json` and the eos token |
| rows of the embedding | `config.json` |

Where no `generation_config.json` names a stop id, tokens that end a turn in well-known templates
stop too, if this template writes them: a copy of a model that lost this file would never stop.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from leyline.errors import ModelError
from leyline.template import ChatTemplate

TEMPLATE_FILE = "chat_template.jinja"
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>")
TURN_ENDS += ("<|user|>", "<|observation|>")  # GLM's turns end where the next one begins


def read_json(path: Path) -> dict[str, Any]:
    """Read an optional JSON object; {} if there is no such file.

    Raises:
        ModelError: If it is there and no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} in the model folder cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} in the model folder must hold a JSON object.")
    return value


def special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The texts of `bos_token`, `eos_token` and so on: strings, or objects with their content."""
    tokens = {}
    for name, value in {**read_json(folder / "special_tokens_map.json"), **config}.items():
        if isinstance(value, Mapping):
            value = value.get("content")
        if name.endswith("_token") and isinstance(value, str):
            tokens[name] = value
    return tokens


def check_added(config: Mapping[str, Any], id_of: Callable[[str], int | None]) -> None:
    """Compare `added_tokens_decoder` in `tokenizer_config.json` with the vocabulary.

    Raises:
        ModelError: If they number a token differently.
    """
    added = config.get("added_tokens_decoder")
    for number, token in added.items() if isinstance(added, Mapping) else ():
        text = token.get("content") if isinstance(token, Mapping) else None
        known = id_of(text) if isinstance(text, str) else None
        if known is not None and str(known) != str(number):
            raise ModelError(
                f"{text!r} is {number} in tokenizer_config.json, but {known} in the vocabulary; "
                "the files belong to different models."
            )


def embedding_rows(folder: Path) -> int | None:
    """How many ids the model has a row for, or None if `config.json` does not say."""
    config = read_json(folder / "config.json")
    inner = config.get("text_config")
    rows = config.get("vocab_size", inner.get("vocab_size") if isinstance(inner, Mapping) else None)
    if rows is None:
        return None
    if type(rows) is not int or rows < 1:
        raise ModelError(f"vocab_size in config.json must be a positive integer, not {rows!r}.")
    return rows


def stop_ids(
    folder: Path,
    tokens: Mapping[str, str],
    id_of: Callable[[str], int | None],
    template: ChatTemplate | None,
) -> set[int]:
    """Ids that end a reply.

    Raises:
        ModelError: If a file names something that is no id.
    """
    generation = _eos_ids(folder, "generation_config.json")
    found = {*generation, *_eos_ids(folder, "config.json")}
    named = [tokens.get("eos_token", "")]
    if not generation and template is not None:
        named += [text for text in TURN_ENDS if text in template.source]
    return found | {number for number in map(id_of, named) if number is not None}


def _eos_ids(folder: Path, name: str) -> list[int]:
    value = read_json(folder / name).get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(token_id) is not int or token_id < 0 for token_id in ids):
        raise ModelError(f"eos_token_id in {name} must be an id or a list of ids, not {value!r}.")
    return ids


def chat_template(
    folder: Path,
    config: Mapping[str, Any],
    tokens: Mapping[str, str],
    instead: str | Path | None = None,
) -> ChatTemplate | None:
    """The chat template in a file of its own, if one is given, or the folder's, if it has one.

    Raises:
        ModelError: If it cannot be used.
    """
    if instead:
        source = _read_text(Path(instead).expanduser())
        if source is None:
            raise ModelError(f"There is no chat template {str(instead)!r}.")
        return ChatTemplate(source, tokens)
    named = _named_templates(config.get("chat_template"))
    for name, path in (
        ("default", folder / TEMPLATE_FILE),
        ("tool_use", folder / "additional_chat_templates" / "tool_use.jinja"),
    ):
        text = _read_text(path)
        if text is not None:
            named[name] = text
    source = named.get("default")
    if source is None:
        return None
    return ChatTemplate(source, tokens, tool_source=named.get("tool_use"))


def _named_templates(value: Any) -> dict[str, str]:
    """Templates by name; a single one is the default."""
    if value is None:
        return {}
    named: dict[str, Any] = {"default": value}
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, Mapping)]
        named = {str(entry.get("name")): entry.get("template") for entry in entries}
    if not all(isinstance(text, str) for text in named.values()):
        raise ModelError("chat_template in tokenizer_config.json must be a text.")
    return named


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path.name} cannot be read: {error}") from error
