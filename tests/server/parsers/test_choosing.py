"""Formats are chosen by what the chat template writes; a flag goes before it."""

from __future__ import annotations

import itertools

import pytest

from leyline.errors import ConfigError
from leyline.server.parsers.choosing import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    Chosen,
    choose,
)
from leyline.server.parsers.formats import GLM47, TOOL_FORMATS, new_call_id
from leyline.server.parsers.pieces import CallHead, ToolUse
from leyline.server.parsers.sections import KIMI_CALL
from leyline.server.parsers.thinking import GLM45
from tests.real_tokenizers import MOONLIGHT_TEMPLATE
from tests.server.parsers.corpus import NO_CALL, USE, glm
from tests.test_real_templates import GLM, PUBLISHED, V2, V3
from tests.tiny_models import TEMPLATE

CHOSEN = {
    "glm-4.7-flash": ("glm47", "glm45"),
    "glm-4.5v": ("glm47", "glm45"),
    "glm-4.6v-flash": ("glm47", "glm45"),
    "glm-5.2": ("glm47", "glm45"),
    "deepseek-v2": ("prompted", "none"),
    "deepseek-v2.5": ("deepseek_v3", "none"),
    "deepseek-v3": ("deepseek_v3", "none"),
    "deepseek-v3.1": ("deepseek_v3", "deepseek_r1"),
    "deepseek-r1": ("deepseek_v3", "deepseek_r1"),
    "qwen-2.5": ("hermes", "none"),
    "qwen-3": ("hermes", "deepseek_r1"),
    "qwen-3.6": ("qwen3_coder", "deepseek_r1"),
    "minimax-m3": ("prompted", "none"),
    "janusflow-1.3b": ("prompted", "none"),
}


@pytest.mark.parametrize("model", CHOSEN)
def test_a_published_template_names_its_formats(model: str):
    chosen = choose(PUBLISHED[model])
    assert (chosen.tool.name, chosen.reasoning.name) == CHOSEN[model]


@pytest.mark.parametrize("source", [V2, MOONLIGHT_TEMPLATE, TEMPLATE, "", None])
def test_a_template_without_tools_is_prompted(source: str | None):
    chosen = choose(source)
    assert (chosen.tool.name, chosen.tool.native, chosen.reasoning.name) == (
        "prompted",
        False,
        "none",
    )


def test_kimis_marker_names_kimis_format():
    assert choose("{{ '" + KIMI_CALL[0] + "' }}").tool.name == "kimi_k2"


def test_what_a_template_does_itself_is_left_to_it():
    glm47, v3 = choose(GLM).tool, choose(V3).tool
    assert glm47.native and glm47.writes_calls
    assert not v3.native and v3.writes_calls  # it writes calls, and never says what tools there are
    told = choose(V2, tool="glm47").tool
    assert not told.native and not told.writes_calls


def test_a_flag_goes_before_the_template():
    chosen = choose(GLM, tool="hermes", reasoning="none")
    assert (chosen.tool.name, chosen.reasoning.name) == ("hermes", "none")
    assert choose(GLM, tool="prompted").tool.native is False
    assert choose(GLM, tool="auto", reasoning="auto") == choose(GLM)
    assert {choose(None, tool=name).tool.name for name in TOOL_PARSERS} == set(TOOL_FORMATS)
    assert [choose(None, reasoning=name).reasoning.name for name in REASONING_PARSERS] == list(
        REASONING_PARSERS
    )


@pytest.mark.parametrize("flag", ["tool", "reasoning"])
def test_an_unknown_name_is_refused_with_those_that_are_known(flag: str):
    with pytest.raises(ConfigError, match="must be one of auto, glm4") as caught:
        choose(GLM, **{flag: "glm48\nINFO"})
    assert caught.value.param == ("--tool-call-parser", "--reasoning-parser")[flag == "reasoning"]
    assert "\n" not in str(caught.value)


def test_every_format_is_a_format():
    forms = list(TOOL_FORMATS.values())
    assert [form.name for form in forms] == list(TOOL_PARSERS)
    assert all(form.markers for form in forms)


def test_markers_are_shown_where_they_are_read():
    chosen = Chosen(GLM47, GLM45)
    assert chosen.markers(USE) == ("<think>", "</think>", *GLM47.markers)
    assert chosen.markers(NO_CALL) == chosen.markers(ToolUse()) == ("<think>", "</think>")


def test_ids_are_fresh_and_of_the_usual_form():
    ids = {new_call_id() for _ in range(100)}
    assert len(ids) == 100 and all(len(one) == 29 and one.startswith("call_") for one in ids)
    parser = Chosen(GLM47, GLM45).parser(USE, "")
    heads = [one for one in parser.push(glm("now") * 3) if isinstance(one, CallHead)]
    assert len({head.call_id for head in heads}) == 3


def tokens_thought(tail: str, *pieces: str) -> int:
    parser = Chosen(GLM47, GLM45).parser(USE, tail)
    for piece in pieces:
        parser.push(piece, 1)
    parser.flush()
    return parser.reasoning_tokens


def test_reasoning_tokens_are_counted_with_their_tags():
    assert tokens_thought("<think>", "H", "m", "</think>", "Yes", ".") == 3
    assert tokens_thought("<think>", "H", "m", "</", "thi", "nk>", "Yes", ".") == 5
    assert tokens_thought("", "<think>", "Hm", "</think>", "Yes") == 3
    assert tokens_thought("</think>", "Yes", ".") == 0
    assert tokens_thought("<think>", "H", "m") == 2
    assert tokens_thought("<think>", "H", *glm("now"), "x") < 2 + len(glm("now"))


def test_a_reply_of_which_one_call_was_wanted_is_soon_enough():
    parser = Chosen(GLM47, GLM45).parser(ToolUse(USE.tools, parallel=False), "")
    assert parser.push("a" + glm("now")[:-1]) and not parser.is_enough
    parser.push(">")
    assert parser.is_enough and parser.complete == {0}
    assert parser.push("b") == parser.flush() == []


def test_a_second_parser_of_a_format_knows_nothing_of_the_first():
    first, second = (Chosen(GLM47, GLM45).parser(USE, "") for _ in range(2))
    first.push("<tool_call>no")
    assert [one.text for one in second.push("ok")] == ["ok"]  # type: ignore[union-attr]
    assert list(itertools.chain(first.flush(), second.flush()))
