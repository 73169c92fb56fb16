"""The four models that Leyline is made for, as numbers: their configs, shipped with the package.

A preset has what `config.json` of the model's hub repository has and an engine needs, so that a
size can be told before anything is downloaded, and tests and benchmarks need no files of others.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from leyline.errors import ModelError
from leyline.model.config import ModelConfig

# Preset to the hub repository whose numbers it has.
HUB_IDS = {
    "deepseek-v2-lite": "deepseek-ai/DeepSeek-V2-Lite",
    "moonlight-16b-a3b": "moonshotai/Moonlight-16B-A3B-Instruct",
    "glm-4.7-flash": "zai-org/GLM-4.7-Flash",
    "joyai-llm-flash": "jdopensource/JoyAI-LLM-Flash",
}


def preset_data(name: str) -> dict[str, Any]:
    """The contents of a preset's `config.json`.

    Raises:
        ModelError: There is no preset of that name; the message lists those that there are.
    """
    if name not in HUB_IDS:
        raise ModelError(
            f"There is no preset {name!r}; the presets are {', '.join(HUB_IDS)}.", param="preset"
        )
    file = resources.files(__name__).joinpath(f"{name}.json")
    return json.loads(file.read_text(encoding="utf-8"))


def preset(name: str) -> ModelConfig:
    """The checked config of a preset; see `preset_data`."""
    return ModelConfig.from_dict(preset_data(name))
