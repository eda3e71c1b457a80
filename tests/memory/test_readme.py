"""The README's numbers on memory are what the plan gives today."""

from __future__ import annotations

from tests.bench._memory_tree import BEGIN, END, README, tree


def test_the_page_on_levers_is_what_the_plan_says():
    text = README.read_text(encoding="utf-8")
    assert text[text.index(BEGIN) : text.index(END)].splitlines()[1:] == tree()
