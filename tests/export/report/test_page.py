"""report.html: what is in it, that it fetches and runs nothing, and how it looks in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.program import here
from tests.support import train_here
from trainer.config.compose import compose
from trainer.config.saved import save_run
from trainer.export.report import page as page_module
from trainer.export.report.charts import POINTS, Chart, Line, line_chart, thinned
from trainer.export.report.page import run_page, write_report
from trainer.tracking.sweep_folder import SweepFolder, Trial

HOSTILE = "</pre><script>alert(1)</script><img src=http://x/y onerror=alert(2)>\x1b[31m\u202e$x^{$ {{ 7*7 }}"
SHOWN = r"</pre><script>alert(1)</script><img src=http://x/y onerror=alert(2)>\x1b[31m\u202e$x^{$ {{ 7*7 }}"


class Page(HTMLParser):
    """Tags, addresses, texts and cells of a page."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href", "xlink:href", "action")]
        self.handlers += [name for name, _ in attributes if name.startswith("on")]

    def handle_data(self, data):
        if data.strip():
            self.texts.append(data.strip())


def rows(count: int = 30) -> list[dict]:
    train = [
        {
            "event": "train",
            "step": step,
            "loss": 2.0 / step,
            "learning_rate": 1e-3,
            "grad_norm": 1.0,
            "tokens_per_second": 1000.0,
            "mfu": 0.25,
            "roof_share": 0.3,
            "memory_peak_gib": 0.5,
            "memory_allocated_gib": 0.25,
        }
        for step in range(1, count + 1)
    ]
    return [*train, {"event": "eval", "step": 0, "eval_loss": 3.0}, {"event": "eval", "step": count, "eval_loss": 0.5}]


def make_run(folder: Path, *words: str) -> Path:
    """A run folder as a run leaves it, with a hostile row in every place that shows one."""
    folder.mkdir(parents=True)
    save_run(compose(["recipe=quickstart", *words]), folder)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    answers = [{"prompt": HOSTILE, "expected": "yes", "base": "no", "trained": HOSTILE}]
    summary = {"status": "completed", "steps": 30, "num_tokens": 12345, "eval_loss": 0.5, "first_eval_loss": 3.0}
    source = {"path": HOSTILE, "rows": 10, "used": 9, "dropped": {HOSTILE: {"rows": 1, "first": [HOSTILE]}}}
    files = {
        "summary.json": {**summary, "final_loss": 2 / 30, "answers": answers},
        "manifest.json": {
            "run_id": "abc",
            "data_hash": "d",
            "hardware": {"device": HOSTILE},
            "versions": {"torch": "9"},
        },
        "plan.json": {"peak_gib": 0.75},
        "data_report.json": {
            "sources": [source],
            "warnings": [HOSTILE],
            "length_histogram": {"edges": [1, 5, 9], "samples": [4, 6]},
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def html(tmp_path_factory) -> str:
    words = ["optim.learning_rate=7e-4", "memory.budget_gib=1"]
    return run_page(make_run(tmp_path_factory.mktemp("report") / "run", *words))


def test_nothing_is_fetched_or_run_whatever_the_rows_say(html):
    page = Page(html)
    assert {"script", "img", "iframe", "link", "object"}.isdisjoint(page.tags)
    assert page.handlers == []
    assert [address for address in page.addresses if not address.startswith("#")] == []
    assert "default-src 'none'" in html
    assert sum(SHOWN in text for text in page.texts) >= 6, "as text, with what a terminal obeys made visible"
    assert "\x1b" not in html and "\u202e" not in html


def test_every_section_is_there(html):
    texts = Page(html).texts
    for title in (
        "Loss a token|Learning rate|Gradient norm|Speed, tokens a second|Share of the device's rate|Memory, GiB|"
        "Lengths of samples|Answers|Data|Different from the recipe|Environment"
    ).split("|"):
        assert title in texts, title
    at = texts.index("optim.learning_rate")
    assert texts[at : at + 3] == ["optim.learning_rate", "0.003", "0.0007"]
    assert {"planned 0.75", "budget 1", "limit 512", "12,345", "held-out loss before"} <= set(texts)
    assert len(html) < 300_000


def test_a_line_goes_through_its_values():
    chart = Chart("t", [Line("a", [1, 2, 3, 5], [4.0, 1.0, 2.5, 3.0])])
    svg = str(line_chart(chart, "k"))
    points = next(
        d for d, style in re.findall(r'<path d="([^"]*)"[^>]*style="([^"]*)"', svg) if "stroke: var(--one)" in style
    )
    found = [tuple(map(float, pair)) for pair in re.findall(r"[ML] ([\d.]+) ([\d.]+)", points)]
    (x0, y0), (x1, y1) = found[0], found[1]
    across, up = (x1 - x0) / 1, (y1 - y0) / -3.0
    assert across > 0 > up, "steps to the right, losses upwards"
    expected = [
        (x0 + across * (x - 1), y0 + up * (y - 4)) for x, y in zip(chart.lines[0].x, chart.lines[0].y, strict=True)
    ]
    assert [pytest.approx(point, abs=1e-3) for point in expected] == found


def test_a_long_line_keeps_its_spikes():
    values = [1.0] * 10_000
    values[4321], values[8765] = 99.0, -5.0
    x, y = thinned(list(range(10_000)), values)
    assert len(x) <= POINTS
    assert {4321, 8765} <= set(x.tolist()) and {99.0, -5.0} <= set(y.tolist())


def test_a_folder_with_half_its_files_has_a_page(tmp_path):
    folder = make_run(tmp_path / "run")
    for name in ("summary.json", "data_report.json", "plan.json"):
        (folder / name).write_text("{")
    (folder / "manifest.json").unlink()
    (folder / "metrics.jsonl").write_text('{"event": "train", "step": 1, "loss": "text"}\n{"event": "tr')
    assert "not finished" in Page(run_page(folder)).texts


def test_a_sweeps_page_has_its_trials_side_by_side(tmp_path, capsys):
    folder = tmp_path / "sweep"
    for number in range(3):
        make_run(folder / str(number))
    write_report(folder / "1")
    sweep = SweepFolder(folder)
    for number, metric in enumerate((0.7, 0.5, None)):
        status = "completed" if metric else "failed: data"
        words = [f"optim.learning_rate={number}", HOSTILE]
        sweep.record(Trial(number, str(folder / str(number)), words, status, 0 if metric else 3, metric, "eval_loss"))
    assert here("report", f"run={folder}") == 0
    html = (folder / "report.html").read_text()
    page = Page(html)
    assert str(folder / "report.html") in capsys.readouterr().out.replace("\n", "")
    assert [a for a in page.addresses if not a.startswith("#")] == ["./1/report.html"], "the one that is there"
    assert "0.5  best" in page.texts and "failed: data" in page.texts and "script" not in page.tags
    assert "trial 2" in page.texts


def test_a_run_writes_it_names_it_and_survives_its_failure(base_overrides, tmp_path, monkeypatch, capsys):
    words = [*base_overrides[:-1], "train.max_steps=2"]
    train_here(words, tmp_path / "run")
    assert (tmp_path / "run/report.html").is_file()
    assert str(tmp_path / "run/report.html") in capsys.readouterr().out.replace("\n", "")

    def fails(folder):
        raise RuntimeError("no fonts")

    monkeypatch.setattr(page_module, "write_report", fails)
    summary = train_here(words, tmp_path / "other")
    assert summary["status"] == "completed" and "no report.html: no fonts" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["report"], ["report", "run=nowhere"]])
def test_a_folder_without_a_run_is_refused(words, capsys):
    assert here(*words) in (2, 5)
    assert "run=" in capsys.readouterr().err


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize(("scheme", "ground"), [("light", (255, 255, 255)), ("dark", (20, 23, 26))])
@pytest.mark.parametrize("width", [390, 1280])
def test_chromium_shows_it_light_and_dark_on_a_phone_and_on_a_desk(tmp_path, scheme, ground, width):
    from PIL import Image

    folder, picture = make_run(tmp_path / "run"), tmp_path / "page.png"
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={width},1600"]
    flags.append(f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}")
    command = [CHROMIUM, *flags, f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={picture}"]
    subprocess.run([*command, write_report(folder).as_uri()], check=True, capture_output=True, timeout=120)
    image = Image.open(picture).convert("RGB")
    assert image.getpixel((2, 2)) == ground
    blue = (31, 111, 235) if scheme == "light" else (108, 176, 255)
    colours = {colour for _, colour in image.getcolors(maxcolors=1 << 24)}
    assert min(sum(abs(a - b) for a, b in zip(colour, blue, strict=True)) for colour in colours) < 60, (
        "the line of a plot"
    )
