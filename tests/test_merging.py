"""Three texts: what was told, the context that was edited, and the template's new rendering."""

from __future__ import annotations

import pytest

from leyline.merging import merged

GLM_TOLD = "<|user|>look: (the weather is bad) now<|assistant|><think>It is October.</think>Rainy."
GLM_NEW = (
    "<|user|>look: (the weather is bad) now<|assistant|></think>Rainy.<|user|>why<|assistant|>"
)
V2_TOLD = "User: look: (the weather is bad) now\n\nAssistant: Rainy, and cold.<eos>"
V2_NEW = (
    "User: look: (the weather is bad) now\n\nAssistant:  Rainy, and cold.<eos>"
    "User: why\n\nAssistant:"
)
BOTH = [(GLM_TOLD, GLM_NEW), (V2_TOLD, V2_NEW)]


@pytest.mark.parametrize(("told", "new"), BOTH)
def test_without_an_edit_it_is_the_rendering(told: str, new: str) -> None:
    assert merged(told, told, new) == new != told


@pytest.mark.parametrize(("told", "new"), BOTH)
def test_without_a_change_of_the_template_it_is_the_edited_text(told: str, new: str) -> None:
    edited = told.replace("the weather is bad", "[gone]")
    assert merged(told, edited, told) == edited
    assert merged(told, edited, told + " more") == edited + " more"


@pytest.mark.parametrize(("told", "new"), BOTH)
@pytest.mark.parametrize(
    ("old", "text"),
    [("the weather is bad", "[gone]"), ("look: (the weather is bad) now", ""), ("Rainy", "Sunny")],
)
def test_both_changes_are_there(told: str, new: str, old: str, text: str) -> None:
    assert merged(told, told.replace(old, text), new) == new.replace(old, text)


def test_reasoning_that_was_edited_goes_with_all_of_it() -> None:
    for text in ("", "It is 4711.", "It is", "Nothing of the kind"):
        edited = GLM_TOLD.replace("It is October.", text)
        assert merged(GLM_TOLD, edited, GLM_NEW) == GLM_NEW


def test_an_edit_that_reaches_over_the_border_stands() -> None:
    edited = GLM_TOLD.replace("October.</think>Rainy", "[gone]")
    text = merged(GLM_TOLD, edited, GLM_NEW)
    assert "Rainy" not in text and "[gone]" in text and text.endswith("<|user|>why<|assistant|>")
