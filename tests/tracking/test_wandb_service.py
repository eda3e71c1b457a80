"""W&B as a run sees it: what is written to its files, what is sent, and what a host that does not answer costs."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.support import metrics, train_here
from tests.tracking.offline import records
from trainer.config.compose import compose
from trainer.tracking import wandb as module
from trainer.tracking.wandb import Mode

TEXT = "A cow says moo. A dog says woof."
"""An answer in the training rows: no tracking service may get it."""


def offline_runs(run_dir) -> list[dict[str, list]]:
    """The records of each offline run in the folder, by kind, oldest first."""
    found = []
    for file in sorted((run_dir / "wandb").glob("offline-run-*/*.wandb")):
        kinds: dict[str, list] = {}
        for record in records(file):
            kind = record.WhichOneof("record_type")
            kinds.setdefault(kind, []).append(getattr(record, kind))
        found.append(kinds)
    return found


def history(kinds: dict) -> list[dict]:
    """Rows of values as they were logged."""
    rows = []
    for record in kinds.get("history", []):
        rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.item})
    return rows


@pytest.fixture(scope="module")
def tracked(tmp_path_factory, tiny, chats):
    """Five steps with evaluations, stopped after the second start: W&B offline."""
    run_dir = tmp_path_factory.mktemp("tracked") / "run"
    words = [*tiny.overrides(), "data=file", f"data.path={chats}", "data.max_length=128", "data.eval_fraction=0.25"]
    words += ["quant=none", "precision=fp32", "optim=adamw", "device=cpu", "train.micro_batch_tokens=128"]
    words += ["train.accumulation_steps=1", "train.eval_every=2", "train.compare_prompts=2", "track=wandb"]
    words += ["track.project=kites", "track.group=red", "track.name=first", "track.tags=[a,b]", "track.notes=windy"]
    words += ["track.mode=offline", "track.log_adapter=true"]
    first = train_here([*words, "train.max_steps=3"], run_dir)
    train_here([*words, "train.max_steps=5", "train.resume=force"], run_dir)
    return run_dir, first


def test_the_run_carries_what_its_user_said(tracked):
    run_dir, _ = tracked
    run = offline_runs(run_dir)[0]["run"][0]
    assert (run.project, run.run_group, run.display_name, list(run.tags)) == ("kites", "red", "first", ["a", "b"])
    assert run.notes == "windy"


def test_both_starts_carry_the_same_id(tracked):
    """R7."""
    run_dir, _ = tracked
    ids = [kinds["run"][0].run_id for kinds in offline_runs(run_dir)]
    assert ids == [json.loads((run_dir / "manifest.json").read_text())["run_id"]] * 2


def test_rows_are_those_of_metrics_jsonl_on_both_axes(tracked):
    run_dir, _ = tracked
    rows = [row for kinds in offline_runs(run_dir) for row in history(kinds)]
    trained = {row["step"]: row for row in rows if "train/loss" in row}
    evaluated = {row["step"]: row for row in rows if "eval/eval_loss" in row}
    assert sorted(trained) == [1, 2, 3, 4, 5]
    for row in metrics(run_dir):
        sent = trained[row["step"]]
        assert sent["train/loss"] == sent["tokens/train_loss"] == row["loss"]
        assert sent["num_tokens"] == sent["train/num_tokens"] == row["num_tokens"]
    tokens = {0: 0} | {row["step"]: row["num_tokens"] for row in metrics(run_dir)}
    for row in metrics(run_dir, "eval"):
        sent = evaluated[row["step"]]
        assert sent["eval/eval_loss"] == sent["tokens/eval_loss"] == row["eval_loss"]
        assert sent["num_tokens"] == tokens[row["step"]]


def test_axes_and_best_values_are_defined(tracked):
    run_dir, _ = tracked
    defined = {metric.name or metric.glob_name: metric for metric in offline_runs(run_dir)[0]["metric"]}
    assert {name: defined[name].step_metric for name in ("train/*", "eval/*", "tokens/*")} == {
        "train/*": "step",
        "eval/*": "step",
        "tokens/*": "num_tokens",
    }
    assert defined["eval/eval_loss"].summary.min and defined["train/tokens_per_second"].summary.max


def test_summary_has_the_best_values(tracked):
    run_dir, _ = tracked
    sent = {}
    for record in offline_runs(run_dir)[-1]["summary"]:
        sent |= {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.update}
    summary = json.loads((run_dir / "summary.json").read_text())
    for key in ("best_eval_loss", "best_step", "final_loss", "steps", "status"):
        assert sent[key] == summary[key]
    assert "answers" not in sent and "stages" not in sent


def test_model_data_and_hardware_are_identified(tracked):
    run_dir, _ = tracked
    manifest = json.loads((run_dir / "manifest.json").read_text())
    sent = {}
    for kinds in offline_runs(run_dir)[:1]:
        for record in [kinds["run"][0].config, *kinds.get("config", [])]:
            sent |= {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.update}
    assert sent["identity"]["data_hash"] == manifest["data_hash"]
    assert sent["identity"]["hardware"] == manifest["hardware"]
    assert sent["identity"]["model"] == manifest["model"] == sent["model"]["path"]
    assert set(sent) - {"_wandb"} == {*compose([]).config.__dict__, "choices", "identity"}


def test_nothing_of_the_data_the_command_or_the_environment_is_in_its_files(tracked):
    run_dir, first = tracked
    assert any(TEXT in json.dumps(answer) for answer in first["answers"]) or first["answers"]
    for file in (run_dir / "wandb").glob("offline-run-*/*.wandb"):
        content = file.read_bytes()
        for word in (TEXT, "pytest-xdist", "PYTHONPATH", "github", "_pytest"):
            assert word.encode() not in content, word
    assert [kinds["run"][0].host for kinds in offline_runs(run_dir)] == ["", ""]


def test_the_adapter_is_an_artifact_on_request(tracked):
    run_dir, _ = tracked
    (artifact,) = [a for kinds in offline_runs(run_dir)[:1] for a in kinds.get("artifact", []) if a.type == "adapter"]
    names = {entry.path for entry in artifact.manifest.contents}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= names


def test_the_link_is_said_at_start_and_end(tracked):
    run_dir, _ = tracked
    text = (run_dir / "train.log").read_text().replace("\n", " ")
    assert text.count("wandb sync") == 4  # two starts, two ends


@pytest.fixture
def with_key(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "f" * 40)
    monkeypatch.delenv("WANDB_MODE", raising=False)


def test_without_a_key_it_is_offline(monkeypatch, tmp_path):
    """C5: decided by looking, never by asking."""
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    assert module.resolve_mode(Mode.auto) is Mode.offline
    monkeypatch.delenv("WANDB_MODE")
    assert module.resolve_mode(Mode.auto) is Mode.offline
    (tmp_path / "netrc").write_text("machine tracking.example login user password secret\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://tracking.example:8080/")
    assert module.resolve_mode(Mode.auto) is Mode.online
    monkeypatch.setenv("WANDB_API_KEY", "f" * 40)
    assert module.resolve_mode(Mode.auto) is Mode.online


def words_of(base_overrides) -> list[str]:
    return [*base_overrides, "train.max_steps=2", "track=wandb", "track.mode=online"]


def test_online_without_a_key_goes_on_offline(base_overrides, tmp_path, monkeypatch):
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_MODE")
    summary = train_here(words_of(base_overrides), tmp_path / "run")
    assert summary["status"] == "completed"
    assert "there is no API key" in (tmp_path / "run" / "train.log").read_text().replace("\n", " ")


@pytest.mark.parametrize("how", ["refused", "silent"])
def test_an_unreachable_host_costs_under_a_minute_and_never_the_run(
    base_overrides, tmp_path, monkeypatch, with_key, how
):
    """C6. A port that refuses, and one that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        if how == "refused":
            server.close()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{address[1]}")
        started = time.perf_counter()
        summary = train_here(words_of(base_overrides), tmp_path / "run")
        assert time.perf_counter() - started < 60
    assert summary["status"] == "completed"
    assert len(metrics(tmp_path / "run")) == 2
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))
    log = (tmp_path / "run" / "train.log").read_text().replace("\n", " ")
    assert "cannot be reached" in log and "f" * 40 not in log


def test_a_host_that_answers_and_then_fails_costs_no_run(base_overrides, tmp_path, monkeypatch, with_key):
    """It answers the first question as W&B does, and everything after that not at all."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            connection, _ = server.accept()
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
            connection.close()

        threading.Thread(target=serve, daemon=True).start()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(module, "INIT_SECONDS", 3)
        started = time.perf_counter()
        summary = train_here(words_of(base_overrides), tmp_path / "run")
        assert time.perf_counter() - started < 60
    assert summary["status"] == "completed"
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))


class Stub(BaseHTTPRequestHandler):
    """A service that answers everything in one way."""

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        code, kind, body = self.server.says
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = answer

    def log_message(self, *_):
        pass


@pytest.fixture
def stub(monkeypatch, with_key):
    with ThreadingHTTPServer(("127.0.0.1", 0), Stub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        yield server
        server.shutdown()


@pytest.mark.parametrize(
    "says, reason",
    [
        ((401, "application/json", b'{"errors": []}'), "refuses the API key (401): log in with `wandb login`"),
        ((500, "text/plain", b"no"), "answers 500"),
        ((200, "text/html", b"<html>Please log in</html>"), "answers with something that is not W&B's"),
    ],
    ids=["401", "500", "html"],
)
def test_a_service_that_refuses_is_named_and_the_run_goes_on_offline(
    says, reason, stub, base_overrides, tmp_path, capfd
):
    """The first reason, in one line; the same run, all of it, to be synced later; nothing else on the screen."""
    import wandb

    stub.says, run = says, tmp_path / "run"
    train_here(words_of(base_overrides), run)
    wandb.teardown()  # its process closes the file after it has answered that the run is finished
    (kinds,) = offline_runs(run)
    assert kinds["run"][0].run_id == json.loads((run / "manifest.json").read_text())["run_id"]
    sent = {row["step"]: row["train/loss"] for row in history(kinds) if "train/loss" in row}
    assert sent == {row["step"]: row["loss"] for row in metrics(run)}
    assert not list((run / "wandb").glob("run-*"))
    screen = capfd.readouterr()
    assert " ".join(screen.out.split()).count(reason) == 2 and "wandb sync" in screen.out  # at the start, at the end
    assert screen.err == "" and "wandb: " not in screen.out and "Traceback" not in screen.out
    assert "f" * 40 not in screen.out


@pytest.mark.parametrize("address", ["htp://x", "not an address", "http://", "http://[half", "http://host:port"])
def test_a_malformed_address_is_named(address, base_overrides, tmp_path, monkeypatch, with_key, capfd):
    monkeypatch.setenv("WANDB_BASE_URL", address)
    tracker = tracker_of(tmp_path, mode=Mode.online)
    assert f"WANDB_BASE_URL={address} is no address" in tracker.where and "wandb sync" in tracker.where
    tracker.log({"event": "train", "step": 1, "loss": 2.0, "num_tokens": 3})
    end(tracker)
    (kinds,) = offline_runs(tmp_path)
    assert [row["train/loss"] for row in history(kinds)] == [2.0]
    assert os.environ["WANDB_BASE_URL"] == address and capfd.readouterr().err == ""


def tracker_of(run_dir, **options):
    track = compose(["track=wandb", "track.mode=offline"]).config.track
    return replace(track, **options).build(run_dir, "abcd1234", {})


def end(tracker) -> None:
    """The run's end and the program's: wandb's own process writes the last records after the first."""
    import wandb

    tracker.finish({"status": "completed"})
    wandb.teardown()


def test_the_environment_wins_over_defaults_and_loses_to_the_command_line(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_PROJECT", "kites")
    monkeypatch.setenv("WANDB_ENTITY", "flyers")
    monkeypatch.setenv("WANDB_NAME", "red")
    track = compose(["track=wandb"]).config.track
    assert (track.project, track.entity, track.name) == ("kites", "flyers", "red")
    track = compose(["track=wandb", "track.project=a", "track.entity=b", "track.name=c"]).config.track
    assert (track.project, track.entity, track.name) == ("a", "b", "c")
    for name in ("WANDB_PROJECT", "WANDB_ENTITY", "WANDB_NAME"):
        monkeypatch.delenv(name)
    track = compose(["track=wandb"]).config.track
    assert (track.project, track.entity, track.name) == ("trainer", None, None)


def test_disabled_by_the_environment_and_not_against_the_command_line(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert tracker_of(tmp_path, mode=Mode.auto) is None and not list(tmp_path.iterdir())
    tracker = tracker_of(tmp_path, mode=Mode.offline)
    end(tracker)
    assert len(offline_runs(tmp_path)) == 1


def test_the_system_page_has_its_values_and_no_name_of_the_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_X_STATS_SAMPLING_INTERVAL", "0.1")
    tracker = tracker_of(tmp_path)
    time.sleep(1)
    end(tracker)
    (kinds,) = offline_runs(tmp_path)
    keys = {item.key for record in kinds["stats"] for item in record.item}
    assert any("cpu" in key for key in keys) and any("memory" in key for key in keys)
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert socket.gethostname().encode() not in file.read_bytes()


def test_a_service_that_breaks_mid_run_is_left_alone(base_overrides, tmp_path, monkeypatch):
    import wandb

    def broken(*_, **__):
        raise RuntimeError("service process died")

    monkeypatch.setattr(wandb.sdk.wandb_run.Run, "log", broken)
    summary = train_here([*words_of(base_overrides), "track.mode=offline"], tmp_path / "run")
    assert summary["status"] == "completed"
    assert "W&B failed (service process died)" in (tmp_path / "run" / "train.log").read_text().replace("\n", " ")


def test_a_trial_is_named_and_grouped_after_its_sweep(base_overrides, tmp_path):
    train_here([*words_of(base_overrides), "track.mode=offline"], tmp_path / "rates" / "3")
    run = offline_runs(tmp_path / "rates" / "3")[0]["run"][0]
    assert (run.display_name, run.run_group) == ("rates-3", "rates")
