"""Three texts: what was told, the context that was edited, and the template's new rendering."""

from __future__ import annotations

from random import Random

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


def test_what_is_new_is_never_lost() -> None:
    told = "User: hi\n\nAssistant: Rainy, cold. \n"
    new = "User: hi\n\nAssistant: Rainy, cold.<eos>User: why\n\nAssistant:"
    text = merged(told, told.replace("cold. \n", "[gone]"), new)
    assert text == "User: hi\n\nAssistant: Rainy, [gone]<eos>User: why\n\nAssistant:"


def test_what_was_taken_out_never_comes_back() -> None:
    told = "<|user|>code?<|assistant|><think>hm</think>\n\n47 \n<|user|>"
    new = "<|user|>code?<|assistant|></think>47<|user|>why 47?<|assistant|>"
    text = merged(told, told.replace("47", ""), new)
    assert text == "<|user|>code?<|assistant|></think><|user|>why 47?<|assistant|>"


@pytest.mark.parametrize("seed", range(300))
def test_random_edits_and_rewritings_are_both_carried_out(seed: int) -> None:
    """Reply and question are of letters of their own, so that what came from where is known."""
    random = Random(seed)
    ask, reply = ("".join(random.choices(letters, k=12)) for letters in ("abc", "klm"))
    lead, trail = (random.choice(["", " ", "\n", " \n", "\n\n"]) for _ in range(2))
    told = f"<u>{ask}<a>{lead}{reply}{trail}"
    new = f"<u>{ask}<a>{reply}<e><u>xyz {ask}<a>"
    start = random.randrange(3, len(told) - 2)
    end = random.randint(start + 1, len(told))
    put = random.choice(["", "[0]"])
    text = merged(told, told[:start] + put + told[end:], new)
    old = text.removesuffix(f"<u>xyz {ask}<a>")
    assert old != text  # what is new is there, whole
    kept = told[:start] + told[end:]
    for letters in ("abc", "klm"):
        left = [letter for letter in kept if letter in letters]
        assert [letter for letter in old if letter in letters] == left
    assert old.count("[0]") <= 1
