"""The seam: an option is a dataclass registered in its group."""

import pytest

from trainer import registry
from trainer.registry import OPTIONS, option


@pytest.fixture(autouse=True)
def own_options(monkeypatch):
    monkeypatch.setattr(registry, "OPTIONS", {group: dict(classes) for group, classes in OPTIONS.items()})


def test_an_option_is_registered_under_its_group_and_name_and_stays_what_it_is():
    class Mine:
        pass

    assert option("optim", "mine")(Mine) is Mine
    assert registry.OPTIONS["optim"]["mine"] is Mine
    assert "mine" not in OPTIONS["optim"]


def test_a_new_group_needs_no_declaration():
    class Mine:
        pass

    option("fresh_group", "mine")(Mine)
    assert registry.OPTIONS["fresh_group"] == {"mine": Mine}


def test_a_name_is_taken_once():
    with pytest.raises(AssertionError, match="optim=adamw is registered twice"):
        option("optim", "adamw")(object)
