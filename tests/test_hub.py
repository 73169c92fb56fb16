"""Models by hub id, against a stand-in of the hub: what is asked for, and what if it goes wrong."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from leyline.config import EngineConfig
from leyline.errors import ConfigError, LeylineError, ModelError
from leyline.hub import find_model, is_hub_id, model_name
from leyline.model.shards import INDEX_NAME
from leyline.model.weights import load_model
from leyline.parts import model_folder
from tests.hub_stand_in import RESET, SILENCE, HubStandIn, hub_stand_in, point_to
from tests.model.folders import DATA, SHARDS, tensors, write
from tests.tiny_models import write_tokenizer

MODEL = "ada/tiny-mla"
NEVER = ("modeling_tiny.py", "pytorch_model.bin", "model.pt", "README.md", "original/x.safetensors")
NEVER += ("tokenizer.model", "merges.txt", "vocab.txt")
SMALL = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    INDEX_NAME,
    "tokenizer.json",
    "tokenizer_config.json",
)


def write_small_tokenizer(folder: Path) -> None:
    """One with no more ids than the model has rows."""
    write_tokenizer(folder)
    spec = json.loads((folder / "tokenizer.json").read_text())
    few = sorted(spec["model"]["vocab"].items(), key=lambda item: item[1])[: DATA["vocab_size"]]
    spec["model"] |= {"vocab": dict(few), "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps(spec))


@pytest.fixture(autouse=True)
def pauses(monkeypatch) -> list[float]:
    """Nobody waits; what would have been waited."""
    waited: list[float] = []
    monkeypatch.setattr("leyline.hub.calls.time.sleep", waited.append)
    return waited


@pytest.fixture
def repository(tmp_path) -> Path:
    folder = write(tmp_path / "repository", tensors(), DATA, sharded=True)
    write_small_tokenizer(folder)
    for name in NEVER:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"never to be fetched")
    return folder


@pytest.fixture
def hub(repository, tmp_path, monkeypatch) -> Iterator[HubStandIn]:
    with hub_stand_in() as stand_in:
        point_to(stand_in.url, tmp_path, monkeypatch)
        stand_in.publish(MODEL, repository)
        yield stand_in


@pytest.fixture
def find(tmp_path) -> Any:
    def call(model: str = MODEL, revision: str = "", **options: Any) -> Path:
        return find_model(model, revision, str(tmp_path / "cache"), progress=False, **options)

    return call


def refusal(call: Any, *arguments: Any, **options: Any) -> LeylineError:
    with pytest.raises((ModelError, ConfigError)) as caught:
        call(*arguments, **options)
    assert "\n" not in caught.value.message
    return caught.value


# What is fetched.


def test_a_snapshot_has_what_an_engine_reads_and_nothing_else(hub, find):
    folder = find()
    assert sorted(p.name for p in folder.iterdir()) == sorted([*SMALL, *SHARDS])
    assert sorted(hub.asked("GET")) == sorted([*SMALL, *SHARDS])
    assert not set(hub.asked()) & set(NEVER)


def test_a_revision_is_resolved_once(hub, find):
    find(revision="main")
    assert hub.lookups() == 1
    find(revision="main")  # a branch may have moved: one look a start, and nothing is fetched
    assert hub.lookups() == 2
    assert len(hub.asked("GET")) == len(SMALL) + len(SHARDS)


def test_a_warm_cache_makes_no_call(hub, find):
    folder = find()
    before = len(hub.requests)
    assert find() == folder
    assert find(revision=folder.name) == folder
    assert len(hub.requests) == before


def test_a_commit_needs_no_look_up(hub, find):
    commit = hub.repositories[MODEL].commit
    assert find(revision=commit).name == commit
    assert hub.lookups() == 0


def test_without_weights_only_the_small_files_come(hub, find):
    folder = find(weights=None)
    assert sorted(p.name for p in folder.iterdir()) == sorted(SMALL)
    assert find().name == folder.name  # the rest comes later, from the same commit
    assert hub.lookups() == 1


def test_a_model_that_cannot_be_run_is_refused_before_its_weights_are_fetched(
    hub, find, repository
):
    (repository / "config.json").write_text(json.dumps(DATA | {"hidden_act": "gelu"}))
    assert "hidden_act" in refusal(find).message
    assert not set(hub.asked()) & set(SHARDS)


def test_the_mtp_file_is_not_fetched(hub, find, repository):
    index = json.loads((repository / INDEX_NAME).read_text())
    index["weight_map"]["model.layers.2.eh_proj.weight"] = "mtp-1-of-1.safetensors"
    (repository / INDEX_NAME).write_text(json.dumps(index))
    (repository / "mtp-1-of-1.safetensors").write_bytes(b"x")
    find()
    assert "mtp-1-of-1.safetensors" not in hub.asked()


def test_templates_for_tools_come_out_of_their_folder(hub, find, repository, monkeypatch):
    for name in ("tool_use.jinja", "x.py"):
        path = repository / "additional_chat_templates" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{{ tools }}")
    (repository / "original" / "params.json").write_text("{}")
    folder = find(weights=None)
    assert (folder / "additional_chat_templates" / "tool_use.jinja").is_file()
    assert not {"additional_chat_templates/x.py", "original/params.json"} & set(hub.asked())
    before = len(hub.requests)
    assert find(weights=None) == folder and len(hub.requests) == before
    remove(folder, "additional_chat_templates/tool_use.jinja")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "tool_use.jinja" in refusal(find).message


def test_a_single_file_needs_no_index(hub, find, tmp_path):
    folder = write(tmp_path / "single", tensors())
    write_small_tokenizer(folder)
    hub.publish("ada/single", folder)
    assert (find("ada/single") / "model.safetensors").is_file()


def test_the_librarys_bars_are_shown_unless_not_wanted(hub, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("TQDM_POSITION", "-1")  # the library's switch for bars without a terminal
    find_model(MODEL, "", str(tmp_path / "one"), progress=False)
    assert capfd.readouterr().err == ""
    find_model(MODEL, "", str(tmp_path / "two"), progress=True)
    assert "Fetching" in capfd.readouterr().err


# A hub that stumbles.


def test_a_cut_download_goes_on_where_it_was_cut(hub, find, repository):
    hub.cut_after[SHARDS[0]] = 1000
    folder = find()
    for shard in SHARDS:
        assert (folder / shard).read_bytes() == (repository / shard).read_bytes()
    assert hub.asked("GET").count(SHARDS[0]) == 2
    assert hub.asked("GET").count(SHARDS[1]) == 1


@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_a_hub_out_of_order_is_asked_again(hub, find, monkeypatch, status):
    hub.fail[f"/api/models/{MODEL}"] = [status]
    assert find().is_dir()
    assert hub.lookups() == 2


@pytest.mark.parametrize("trouble", [RESET, SILENCE])
@pytest.mark.parametrize("revision", ["", "main"])
def test_a_look_up_that_is_cut_or_not_answered_is_made_again(
    hub, find, monkeypatch, pauses, trouble, revision
):
    monkeypatch.setattr("leyline.hub.calls.LOOKUP_TIMEOUT_S", 0.3)
    hub.fail[f"/api/models/{MODEL}"] = [trouble, trouble]
    assert find(revision=revision).is_dir()
    assert hub.lookups() == 3 and pauses == [1.0, 2.0]


@pytest.mark.parametrize(("trouble", "said"), [(RESET, "reset"), (SILENCE, "timed out")])
def test_a_look_up_that_never_succeeds_is_given_up_in_one_line(
    hub, find, monkeypatch, trouble, said
):
    monkeypatch.setattr("leyline.hub.calls.LOOKUP_TIMEOUT_S", 0.3)
    hub.fail[f"/api/models/{MODEL}"] = [trouble] * 99
    message = refusal(find).message
    assert hub.url in message and said in message and "Nothing of it is in the cache" in message
    assert hub.lookups() == 3


def test_where_nobody_listens_nobody_is_asked_again(hub, find, pauses):
    hub.stop()
    assert "onnect" in refusal(find).message
    assert pauses == []


def test_a_look_up_that_fails_is_no_matter_if_all_is_cached(hub, find, caplog):
    folder = find()
    for answers in ([RESET] * 3, [401] * 3, [429] * 9):
        hub.fail[f"/api/models/{MODEL}"] = answers
        assert find(revision="main") == folder
    assert "going on with what is cached" in caplog.text
    hub.fail.clear()
    assert "no revision" in refusal(find, revision="v9").message


def test_a_connection_reset_before_a_file_is_made_again(hub, find, repository):
    hub.fail[f"/resolve/{hub.repositories[MODEL].commit}/{SHARDS[0]}"] = [RESET, RESET]
    folder = find()
    assert (folder / SHARDS[0]).read_bytes() == (repository / SHARDS[0]).read_bytes()
    assert hub.asked("GET").count(SHARDS[1]) == 1


def test_a_hub_that_stays_out_of_order_is_given_up(hub, find, monkeypatch):
    hub.fail[f"/api/models/{MODEL}"] = [503] * 99
    error = refusal(find)
    assert MODEL in error.message and "503" in error.message and hub.url in error.message
    assert hub.lookups() == 3


def test_a_file_that_cannot_be_had_is_given_up(hub, find, monkeypatch):
    hub.fail[f"/resolve/{hub.repositories[MODEL].commit}/{SHARDS[0]}"] = [500] * 999
    message = refusal(find).message
    assert MODEL in message and "500" in message
    assert f"The cache lacks {SHARDS[0]}" in message and SHARDS[1] not in message


def test_a_full_disk_is_named(hub, find, monkeypatch):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("leyline.hub.repository.snapshot_download", full)
    assert "No space left on device" in refusal(find).message


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("cut at https://cdn.hf.co/x/y?Policy=aGk&Signature=s3cret&Key-Pair-Id=K", "/x/y"),
        ("cut at 'https://cdn.hf.co/x/y?Signature=s3cret', sorry", "/x/y', sorry"),
        ("cut at https://ada:s3cret@hf.co/x", "https://hf.co/x"),
        ("cut at http://hf.co#s3cret (really?)", "http://hf.co (really?)"),
    ],
)
def test_a_signed_address_is_told_without_its_signature(hub, find, monkeypatch, caplog, text, told):
    def cut(*_: Any, **__: Any) -> None:
        raise OSError(text)

    monkeypatch.setattr("leyline.hub.repository.snapshot_download", cut)
    message = refusal(find).message
    assert told in message and "s3cret" not in message
    logging.getLogger("huggingface_hub.utils._http").warning("'%s' while requesting", text)
    (record,) = [one for one in caplog.records if "while requesting" in one.getMessage()]
    assert told in record.getMessage() and "s3cret" not in record.getMessage()


# What the hub refuses.


def test_a_repository_that_is_not_there(hub, find):
    error = refusal(find, "ada/nothing")
    assert "neither a folder nor a hub repository 'ada/nothing'" in error.message
    assert "HF_TOKEN" in error.message


def test_a_gated_repository(hub, find, repository):
    hub.publish("ada/gated", repository, gated=True, token="secret")
    assert "accept its terms" in refusal(find, "ada/gated").message


def test_a_revision_that_is_not_there(hub, find):
    error = refusal(find, revision="v9")
    assert "no revision 'v9'" in error.message and error.param == "revision"


def test_a_repository_without_a_config(hub, find, repository):
    (repository / "config.json").unlink()
    assert "lacks config.json" in refusal(find).message


@pytest.mark.parametrize("absent", [SHARDS[1], "tokenizer.json"])
def test_a_repository_that_lacks_a_file(hub, find, repository, absent):
    (repository / absent).unlink()
    assert absent in refusal(find).message
    assert (SHARDS[0] in hub.asked("GET")) == (absent == SHARDS[1])


def sentencepiece(spec: dict[str, Any]) -> None:
    """The form of Llama 2's and Mistral 7B's `tokenizer.json`."""
    spec["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }


def metaspace(spec: dict[str, Any]) -> None:
    """The form that newer conversions have."""
    plain = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first"}
    spec["decoder"] = {**plain, "split": False}


@pytest.mark.parametrize("form", [sentencepiece, metaspace])
def test_a_sentencepiece_vocabulary_is_refused_before_weights_are_fetched(
    hub, find, repository, form
):
    spec = json.loads((repository / "tokenizer.json").read_text())
    form(spec)
    (repository / "tokenizer.json").write_text(json.dumps(spec))
    message = refusal(find).message
    assert "SentencePiece" in message and "only byte-level BPE is supported" in message
    assert not set(hub.asked()) & set(SHARDS)
    assert "SentencePiece" in refusal(find).message  # the second time too


def test_a_vocabulary_of_another_kind_is_named_by_its_decoder(hub, find, repository):
    spec = json.loads((repository / "tokenizer.json").read_text())
    spec["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (repository / "tokenizer.json").write_text(json.dumps(spec))
    assert "a decoder of type WordPiece" in refusal(find).message


def test_a_tokenizer_of_another_model_is_refused_before_weights_are_fetched(hub, find, repository):
    write_tokenizer(repository)
    assert "different models" in refusal(find).message
    assert not set(hub.asked()) & set(SHARDS)


def test_a_repository_without_safetensors(hub, find, repository):
    for name in (*SHARDS, INDEX_NAME):
        (repository / name).unlink()
    assert "model.safetensors" in refusal(find).message


# No network.


def test_without_a_network_a_full_cache_is_enough(hub, find):
    folder = find()
    hub.stop()
    assert find() == folder
    assert find(revision="main") == folder


@pytest.mark.parametrize("revision", ["", "main"])
def test_offline_a_full_cache_is_enough_and_no_call_is_made(hub, find, monkeypatch, revision):
    folder = find()
    before = len(hub.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find(revision=revision) == folder
    assert len(hub.requests) == before


def test_without_a_network_and_a_cache_one_line_says_so(hub, find, tmp_path):
    hub.stop()
    error = refusal(find)
    assert hub.url in error.message and "onnect" in error.message
    assert f"Nothing of it is in the cache '{tmp_path / 'cache'}'" in error.message


def remove(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).resolve().unlink()
        (folder / name).unlink()


@pytest.mark.parametrize("offline", [False, True])
def test_a_partial_cache_names_everything_that_is_missing(hub, find, monkeypatch, offline):
    folder = find()
    remove(folder, *SHARDS, "generation_config.json")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    hub.stop()
    message = refusal(find).message
    for name in (*SHARDS, "generation_config.json"):
        assert name in message
    assert ("HF_HUB_OFFLINE is set" in message) == offline


def test_a_partial_cache_is_completed_with_the_commit_it_began_with(hub, find):
    folder = find()
    remove(folder, SHARDS[0])
    before = hub.lookups()
    assert find() == folder
    assert hub.lookups() == before and hub.asked("GET").count(SHARDS[0]) == 2
    assert hub.asked("GET").count(SHARDS[1]) == 1


@pytest.mark.parametrize("complete", [True, False])
def test_a_cache_that_other_tools_filled_is_used_as_far_as_it_goes(
    hub, find, monkeypatch, complete
):
    """Older versions of the library, or a copy, have no list of what there is."""
    folder = find()
    for listing in folder.parents[1].glob("trees/*"):
        listing.unlink()
    monkeypatch.setattr("huggingface_hub._tree_cache._IN_MEMORY_TREE_CACHE", {})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    before = len(hub.requests)
    if complete:
        assert find() == folder
    else:
        remove(folder, SHARDS[0], "tokenizer.json")
        message = refusal(find).message
        assert SHARDS[0] in message and "tokenizer.json" in message and SHARDS[1] not in message
    assert len(hub.requests) == before


# Folders, and texts that are neither.


def test_a_folder_never_touches_the_hub(hub, find, repository, monkeypatch):
    monkeypatch.chdir(repository.parent)
    assert find(str(repository)) == repository
    assert find("./repository") == Path("repository")
    Path("ada/tiny-mla").mkdir(parents=True)
    assert find(MODEL) == Path(MODEL)  # a folder of that name comes first
    assert hub.requests == []


def test_a_folder_has_no_revisions(find, repository):
    error = refusal(find, str(repository), "v1")
    assert isinstance(error, ConfigError) and error.param == "revision"


@pytest.mark.parametrize(
    "text",
    [
        "tiny",
        "./tiny/mla",
        "../x",
        "~/x",
        "/x/y",
        "a/b/c",
        "a//b",
        "a/b--c",
        "-a/b",
        "a b/c",
        "a/\0",
    ],
)
def test_what_is_neither_a_folder_nor_a_hub_id_is_refused_without_a_call(hub, find, text):
    assert "no model folder" in refusal(find, text).message
    assert not is_hub_id(text) and hub.requests == []


def test_what_clients_call_a_model(tmp_path):
    assert model_name(MODEL) == MODEL
    assert model_name(str(tmp_path)) == tmp_path.name


def test_an_engine_finds_its_model_by_hub_id(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = model_folder(EngineConfig(model=MODEL, progress=False))
    assert folder.name == hub.repositories[MODEL].commit
    assert load_model(folder, progress=False).config.hidden_size == DATA["hidden_size"]


# The environment, which the library reads when it is imported.

SCRIPT = """
import sys
from leyline.hub import find_model
from leyline.errors import ModelError
try:
    print(find_model("ada/private", progress=False).name)
except ModelError as error:
    print("refused:", error.message)
"""


def in_a_process(tmp_path: Path, **environment: str) -> str:
    full = {"HF_HOME": str(tmp_path / "home"), "PATH": ""} | environment
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=full,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_hubs_environment_is_honoured(hub, repository, tmp_path):
    private = hub.publish("ada/private", repository, token="secret")
    assert "HF_TOKEN" in in_a_process(tmp_path, HF_ENDPOINT=hub.url)
    told = in_a_process(tmp_path, HF_ENDPOINT=hub.url, HF_TOKEN="secret")
    assert told == private.commit
    assert {r.token for r in hub.requests[-3:]} == {"Bearer secret"}
    before = len(hub.requests)
    assert in_a_process(tmp_path, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1") == private.commit
    cold = in_a_process(tmp_path / "cold", HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in cold and "Nothing of it" in cold
    assert len(hub.requests) == before


def test_a_name_of_5000_characters_is_refused_in_a_short_line():
    error = refusal(find_model, "a" * 5000)
    assert isinstance(error, ModelError) and len(error.message) < 500


def test_a_folder_that_may_not_be_looked_at_is_refused(monkeypatch):
    def denied(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.is_dir", denied)
    assert "Permission denied" in refusal(find_model, "secret/model").message
