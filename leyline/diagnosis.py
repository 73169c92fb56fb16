"""What `leyline doctor` found out about a model: for programs as JSON, for people as a table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Diagnosis:
    """What would happen; every field is a JSON value or made of them.

    Attributes:
        model: Its name.
        family: What it is.
        shape: The sizes that matter for the cache.
        parameters: "total", and "active": those that one token is multiplied by.
        weights: Dtype and bytes in memory, and what is on disk.
        cache: Bytes a token with either dtype of the rope band, and how many tokens there are.
        device: Where it would run, and the memory there, in bytes.
        kernels: What computes what.
        text: Tokenizer, template and stop ids.
        parsers: Of tool calls and of reasoning.
        warnings: What a user should know beforehand.
    """

    model: str
    family: str
    shape: dict[str, int]
    parameters: dict[str, int]
    weights: dict[str, Any]
    cache: dict[str, Any]
    device: dict[str, Any]
    kernels: dict[str, str]
    text: dict[str, Any]
    parsers: dict[str, str]
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """The same for programs."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        lines = [f"{label + ':':<14}{value}" for label, value in _rows(self)]
        warnings = [f"! {warning}" for warning in self.warnings] or ["No warnings."]
        return "\n".join([*lines, "", *warnings])


def _rows(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Label and value of every line."""
    shape, cache = diagnosis.shape, diagnosis.cache
    weights, parameters = diagnosis.weights, diagnosis.parameters
    on_disk = "not on this machine"
    if weights["is_complete"]:
        on_disk = f"{size(weights['stored_bytes'])} on disk"
    elif weights["stored_bytes"]:
        on_disk = f"{size(weights['stored_bytes'])} to download"
    experts = f", {shape['routed_experts']} experts" if shape["routed_experts"] else ""
    rows = cache["bytes_per_token"]
    return [
        ("Model", diagnosis.model),
        ("Family", diagnosis.family),
        (
            "Shape",
            f"{shape['layers']} layers, {shape['heads']} heads, latent {shape['kv_lora_rank']} + "
            f"rope band {shape['qk_rope_head_dim']}{experts}, window {shape['window']:,}",
        ),
        (
            "Parameters",
            f"{_count(parameters['total'])}, {_count(parameters['active'])} active a token",
        ),
        ("Weights", f"{size(weights['bytes'])} in {weights['dtype']}; {on_disk}"),
        (
            "Cache",
            f"{rows['bfloat16']:,} bytes a token with a bfloat16 band, {rows['float32']:,} with a "
            f"float32 band (chosen: {cache['band_dtype']})",
        ),
        (
            "Cache size",
            f"{cache['tokens']:,} tokens; {cache['tokens_that_fit']:,} fit beside the weights",
        ),
        (
            "Device",
            f"{diagnosis.device['name']}; {size(diagnosis.device['free_bytes'])} free",
        ),
        *((f"  {name}", how) for name, how in diagnosis.kernels.items()),
        ("Text", _text_row(diagnosis.text)),
        (
            "Parsers",
            f"tool calls: {diagnosis.parsers['tool_calls']}; reasoning: "
            f"{diagnosis.parsers['reasoning']}",
        ),
    ]


def _text_row(text: dict[str, Any]) -> str:
    if not text["known"]:
        return "told once the files are here"
    if text["error"] is not None:
        return "cannot be read"
    template = "chat template" if text["has_template"] else "no chat template"
    stops = ", ".join(map(str, text["stop_ids"])) or "none"
    bos = "none" if text["bos_id"] is None else text["bos_id"]
    return f"{text['vocab_size']:,} ids, bos {bos}, stop ids {stops}, {template}"


def _count(number: int) -> str:
    return f"{number / 1e9:.3f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def size(num_bytes: float) -> str:
    """A size for people."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"
