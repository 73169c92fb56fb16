"""What can be set about an engine; the command line derives its flags from these fields."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from leyline.errors import ConfigError

DTYPES = ("auto", "bfloat16", "float32")
ROPE_DTYPES = ("float32", "bfloat16")
EDIT_MODES = ("forget", "amortize", "heal")


def option(default: Any, help_text: str, *, choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field with the one help text that documentation and command line share."""
    return field(default=default, metadata={"help": help_text, "choices": choices})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The options of an `Engine`.

    Raises:
        ConfigError: If a value is out of range.
    """

    model: str = option(
        "",
        "Folder of the model, or its id on the hub, such as deepseek-ai/DeepSeek-V2-Lite; empty "
        "serves the embedded SmolLM2-135M-Instruct.",
    )
    revision: str = option(
        "", "Branch, tag or commit of a model on the hub; empty takes the main branch."
    )
    download_dir: str = option(
        "", "Folder that models are downloaded to; the default is the hub library's cache."
    )
    chat_template: str = option(
        "", "File with the chat template to use; empty takes the model's own."
    )
    check_weights: bool = option(
        False, "Refuse weights that are not finite; reads every tensor once more."
    )
    dtype: str = option(
        "auto", "Dtype of weights and latents; auto takes the model's.", choices=DTYPES
    )
    device: str = option("auto", "Where to run, such as cpu or cuda:0; auto takes a GPU if any.")
    max_model_len: int | None = option(
        None, "Tokens a context holds at most; the default is what the model was trained for."
    )
    kv_cache_tokens: int | None = option(
        None, "Tokens the cache holds; the default takes a quarter of the free memory at most."
    )
    kv_rope_dtype: str = option(
        "float32",
        "Dtype of the cached rope band; bfloat16 saves memory, but drifts when edited often.",
        choices=ROPE_DTYPES,
    )
    max_num_batched_tokens: int = option(512, "Tokens computed in one step at most.")
    max_num_seqs: int = option(32, "Requests that run at the same time at most.")
    max_sessions: int = option(256, "Sessions kept at most; the longest unused makes room.")
    session_ttl_s: float = option(3600.0, "Seconds after which an unused session is forgotten.")
    max_session_tokens: int | None = option(
        None, "Tokens that all sessions hold together at most; the longest unused makes room."
    )
    sessions_file: str = option(
        "", "File that sessions are restored from and saved to, on shutdown and on demand."
    )
    keep_versions: int = option(4, "Earlier contexts that a session can go back to; 0 keeps none.")
    session_share: float = option(
        0.25, "Share of the cache that a session's context and its kept versions may fill."
    )
    pin_share: float = option(0.25, "Share of the cache that one tenant may pin.")
    edit_mode: str = option(
        "forget",
        "What becomes of the rows behind an edit that a chat request's own history shows.",
        choices=EDIT_MODES,
    )
    min_run: int = option(16, "Tokens in a row worth keeping between two edits of a history.")
    context_management: str = option(
        "", 'Edits of every chat history, as JSON: {"edits": [{"type": "truncate_older_than"}]}.'
    )
    policy: str = option(
        "", "A policy of your own for every chat history: module:function, or an entry point."
    )
    protect_first: int = option(1, "Tokens at the head of a context that no edit may touch.")
    num_threads: int | None = option(None, "CPU threads to compute with; the default is torch's.")
    seed: int | None = option(None, "Makes requests without a seed of their own reproducible.")
    progress: bool = option(True, "Show progress bars while loading.")

    def __post_init__(self) -> None:
        for entry in fields(self):
            self._of_type(entry.name, type(entry.default))
        if self.seed is not None and type(self.seed) is not int:
            raise ConfigError(f"seed is {self.seed!r}; it must be an integer.", param="seed")
        for name in ("max_model_len", "kv_cache_tokens", "num_threads", "max_session_tokens"):
            if getattr(self, name) is not None:
                self._at_least(name, 1)
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_sessions", "min_run"):
            self._at_least(name, 1)
        for name in ("protect_first", "keep_versions"):
            self._at_least(name, 0)
        for name in ("session_share", "pin_share"):
            self._share(name)
        if not (isinstance(self.session_ttl_s, int | float) and self.session_ttl_s > 0):
            raise ConfigError("session_ttl_s must be above 0 seconds.", param="session_ttl_s")
        for entry in fields(self):
            self._one_of(entry.name, entry.metadata["choices"])

    def _of_type(self, name: str, kind: type) -> None:
        """Refuse a text or a flag that is none; numbers have checks of their own."""
        value = getattr(self, name)
        if kind in (str, bool) and type(value) is not kind:
            what = "a string" if kind is str else "true or false"
            raise ConfigError(f"{name} is {value!r}; it must be {what}.", param=name)

    def _at_least(self, name: str, least: int) -> None:
        """Refuse a number that is too small, or none."""
        value = getattr(self, name)
        if type(value) is not int or value < least:
            raise ConfigError(
                f"{name} is {value!r}; it must be an integer, {least} or more.", param=name
            )

    def _share(self, name: str) -> None:
        """Refuse what is no part of a whole."""
        value = getattr(self, name)
        if not (type(value) in (int, float) and 0 <= value <= 1):
            raise ConfigError(f"{name} is {value!r}; it must be from 0 to 1.", param=name)

    def _one_of(self, name: str, choices: tuple[str, ...]) -> None:
        """Refuse a value that is not among the choices, where there are any."""
        value = getattr(self, name)
        if choices and value not in choices:
            raise ConfigError(
                f"{name} is {value!r}; it must be one of {', '.join(choices)}.", param=name
            )
