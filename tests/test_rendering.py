"""What goes into a prompt beside the messages: tools, variables, and replies to be continued."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from leyline.errors import InvalidRequestError
from leyline.rendering import PLAIN, Rendering, rendered
from leyline.template import ChatTemplate

SOURCE = (
    "{% if tools %}[{% for tool in tools %}{{ tool.function.name }};{% endfor %}]{% endif %}"
    "{% if mood %}({{ mood }}){% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
QUESTION = {"role": "user", "content": "Why?"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


@dataclass
class Renderer:
    source: str = SOURCE
    part_separator: str = "\n"

    def render(self, messages: Any, **variables: Any) -> str:
        return ChatTemplate(self.source).render(messages, **variables)


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def test_a_plain_conversation_ends_with_the_head_of_a_reply() -> None:
    assert rendered(Renderer(), [QUESTION]) == "<user>Why?</><assistant>"
    assert rendered(Renderer(), [QUESTION], PLAIN) == Renderer().render([QUESTION])


def test_the_head_of_a_reply_can_be_left_out() -> None:
    assert rendered(Renderer(), [QUESTION], Rendering(opens_reply=False)) == "<user>Why?</>"


def test_tools_and_variables_reach_the_template() -> None:
    rendering = Rendering(tools=(TOOL,), variables={"mood": "calm"})
    assert rendered(Renderer(), [QUESTION], rendering) == "[look;](calm)<user>Why?</><assistant>"


def test_a_template_is_told_other_messages_than_there_are() -> None:
    def shouted(messages: Any) -> Any:
        return [{**one, "content": one["content"].upper()} for one in messages]

    told = Rendering(told=shouted)
    assert rendered(Renderer(), [QUESTION], told) == "<user>WHY?</><assistant>"
    begun = Rendering(told=lambda messages: [QUESTION, *messages], continues_reply=True)
    asked = rendered(Renderer(), [QUESTION, said("Because")], begun)
    assert asked == "<user>Why?</><user>Why?</><assistant>Because"


@pytest.mark.parametrize("text", ["Because", "Because ", "", "</>", "<user>Why?</>"])
def test_a_reply_goes_on_exactly_where_its_text_ends(text: str) -> None:
    asked = rendered(Renderer(), [QUESTION, said(text)], Rendering(continues_reply=True))
    assert asked == f"<user>Why?</><assistant>{text}"


def test_a_reply_in_parts_goes_on_too() -> None:
    parts = [{"type": "text", "text": "Because"}, {"type": "text", "text": "of"}]
    asked = rendered(Renderer(), [QUESTION, said(parts)], Rendering(continues_reply=True))
    assert asked.endswith("<assistant>Because\nof")


@pytest.mark.parametrize(
    "messages",
    [[], [QUESTION], [QUESTION, said("", tool_calls=[{"function": {"name": "look"}}])]],
)
def test_what_is_no_reply_is_not_continued(messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be continued") as caught:
        rendered(Renderer(), messages, Rendering(continues_reply=True))
    assert caught.value.param == "continue_final_message"


def test_a_reply_that_the_template_does_not_write_is_not_continued() -> None:
    with pytest.raises(InvalidRequestError, match="does not write"):
        rendered(Renderer("{{ bos }}"), [QUESTION, said("x")], Rendering(continues_reply=True))


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token"])
def test_what_the_engine_sets_cannot_be_set(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        rendered(Renderer(), [QUESTION], Rendering(variables={name: "x"}))
    assert caught.value.param == "chat_template_kwargs"
