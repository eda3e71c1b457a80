"""What the next trial of a search has, and which trials are hopeless."""

import json
import statistics
from pathlib import Path

import pytest

from trainer.commands.drawn_trials import _batches, drawn_trials
from trainer.commands.study import Pruning, draw, hopeless
from trainer.config.check import parse
from trainer.config.compose import compose, composing
from trainer.config.space import Interval, corners, space_of
from trainer.errors import ConfigError
from trainer.tracking.sweep_folder import SweepFolder, Trial

WORDS = ["optim.learning_rate=tag(log,interval(1e-4,1e-1))", "adapter.r=int(interval(2,9))", "optim=adamw,muon"]
SPACE = space_of(parse(WORDS))


def search(**changes):
    words = [f"search.{key}={value}" for key, value in changes.items()]
    return compose(["search=optuna", *words]).config.search


def trial(number: int, words: list[str], metric: float | None, folder: Path = Path("."), status="completed") -> Trial:
    return Trial(number, str(folder / str(number)), words, status, 0, metric, "eval_loss")


def test_a_space_is_intervals_and_words():
    assert SPACE == {
        "optim.learning_rate": Interval(1e-4, 1e-1, True),
        "adapter.r": Interval(2, 9, False),
        "optim": ["adamw", "muon"],
    }
    assert SPACE["adapter.r"].whole and not SPACE["optim.learning_rate"].whole


@pytest.mark.parametrize("word", ["seed=interval(3,3)", "seed=interval(4,1)", "seed=tag(log,interval(0,1))"])
def test_an_interval_that_is_none_is_refused(word):
    with pytest.raises(ConfigError, match="from a smaller number to a larger one"):
        space_of(parse([word]))


def test_corners_have_each_value_once():
    tried = corners(parse(["seed=7", "a=1,2,3", "b=interval(0.5,1)"]))
    assert tried == [
        ["seed=7", "a=1", "b=0.5"],
        ["seed=7", "a=2", "b=0.5"],
        ["seed=7", "a=3", "b=0.5"],
        ["seed=7", "a=1", "b=1.0"],
    ]


def test_what_is_drawn_lies_in_the_space_and_follows_from_the_history():
    settings, told = search(random_trials=2), []
    for number in range(8):
        words = draw(settings, SPACE, 0, number, told, [])
        values = dict(word.split("=") for word in words)
        assert values.keys() == SPACE.keys()
        assert 1e-4 <= float(values["optim.learning_rate"]) <= 1e-1 and 2 <= int(values["adapter.r"]) <= 9
        assert words == draw(settings, SPACE, 0, number, told, []), "the same history, the same words"
        told.append(trial(number, words, abs(float(values["optim.learning_rate"]) - 1e-2)))
    assert len({tuple(t.overrides) for t in told}) == 8
    other = draw(settings, SPACE, 1, 0, [], [])
    assert other != told[0].overrides, "the seed decides"


def test_a_search_learns():
    """x is drawn around the best of what was told: the oracle is chance, a mean distance of a quarter."""
    space = {"x": Interval(0.0, 1.0, False)}
    told = [trial(n, [f"x={n / 20}"], abs(n / 20 - 0.3)) for n in range(20)]
    drawn = [float(draw(search(), space, 0, 20 + n, told, [])[0][2:]) for n in range(10)]
    assert statistics.mean(abs(x - 0.3) for x in drawn) < 0.1


def test_failed_pruned_and_running_trials_are_told_too():
    words = ["optim.learning_rate=0.01", "adapter.r=4", "optim=adamw"]
    told = [trial(0, words, None, status="failed: data"), trial(1, words, 2.0, status="pruned")]
    assert len(draw(search(parallel=2), SPACE, 0, 2, told, [words])) == 3


@pytest.mark.parametrize("losses", [{2: 3.0}, {2: 2.0}, {2: 1.9}, {2: 9.0, 4: 1.0}, {2: 9.0, 4: 8.0}])
def test_the_median_rule(losses):
    """By hand: its best loss so far against the median of the others' at its last step."""
    others = [{2: 1.0, 4: 0.5}, {2: 2.0, 4: 1.5}, {2: 5.0, 4: 4.0}]
    step = max(losses)
    median = statistics.median(other[step] for other in others)
    assert hopeless(3, losses, others) == (min(losses.values()) > median)
    assert not hopeless(4, losses, others), "too few trials to compare with"


def test_pruning_reads_the_folders(tmp_path):
    folder = SweepFolder(tmp_path)

    def rows(number: int, *losses: float) -> Path:
        place = tmp_path / str(number)
        place.mkdir(exist_ok=True)
        events = [{"event": "eval", "step": 2 * i, "eval_loss": loss} for i, loss in enumerate(losses)]
        (place / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        return place

    for number, losses in enumerate([(9.0, 1.0), (9.0, 2.0)]):
        rows(number, *losses)
        folder.record(trial(number, [], losses[-1], tmp_path))
    watch = Pruning(search(prune_after=2), folder, tmp_path / "2")
    assert not watch(), "nothing is there yet"
    rows(2, 99.0)
    assert not watch(), "the evaluation before the first step is everyone's"
    rows(2, 99.0, 1.2)
    assert not watch()
    rows(2, 99.0, 1.2, 1.0)
    assert not watch()
    watch = Pruning(search(prune_after=2), folder, rows(3, 9.0, 1.6))
    assert watch()


def test_the_missing_trials_are_given_in_batches(tmp_path):
    assert _batches([0, 1, 2, 4, 5, 9], 2) == [[0, 1], [2], [4, 5], [9]]
    words = ["search=optuna", "search.trials=5", "search.parallel=2", f"output_dir={tmp_path}", "seed=3"]
    with composing([*words, f"hydra.sweep.dir={tmp_path}"]) as composed:
        swept = [*words, "adapter.r=int(interval(2,9))"]
        batches = list(drawn_trials(composed, swept))
        assert [(first, len(batch)) for first, batch in batches] == [(0, 2), (2, 2), (4, 1)]
        every = [words for _, batch in batches for words in batch]
        assert all(w[:-1] == words and w[-1].startswith("adapter.r=") for w in every)
        folder = SweepFolder(tmp_path)
        for number, status in enumerate(["completed", "failed: data", "pruned", "does not fit"]):
            folder.record(trial(number, every[number], 1.0, tmp_path, status))
        again = list(drawn_trials(composed, swept))
        assert [(first, len(batch)) for first, batch in again] == [(1, 1), (3, 2)]
        assert again[0][1][0] == every[1] and again[1][1][0] == every[3], "with the words that they had"
