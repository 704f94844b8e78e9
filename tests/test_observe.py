"""What a run shows of itself: its files, how a resume winds them back, the report, and the lines of a log."""

import io
import json
import logging
import math
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vime.observe import metrics
from vime.observe.live import LiveView, Pace, before_after_table, spark
from vime.observe.metrics import ObserveError, Recorder, read_run, rewind
from vime.observe.report import write_report
from vime.observe.summary import changes, curve, duration, number, phase_table, shareable, thin, ticks

ROW = {
    "split": "train", "group": 1, "task": "t1", "prompt": "1 + 1", "response": "2", "answer": "2", "reward": 1.0,
    "advantage": 0.5, "tokens": 3, "finish": "stop", "version": 0,
}  # fmt: skip


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def scalars(run_dir: Path, tag: str) -> list[tuple[int, float]]:
    board = EventAccumulator(str(run_dir / "tensorboard"))
    board.Reload()
    return [(event.step, event.value) for event in board.Scalars(tag)]


def record(run_dir: Path, steps: int, **extra: float) -> None:
    recorder = Recorder(run_dir)
    for step in range(1, steps + 1):
        times = {"time/step": 3.0, "time/rollout": 2.0, "time/train": 0.5}
        recorder.log("step", step, {"reward/mean": step / steps, "reward/std": 0.1, **times, **extra})
    recorder.close()


def plain_view(monkeypatch: pytest.MonkeyPatch) -> tuple[LiveView, io.StringIO]:
    monkeypatch.delenv("CI", raising=False)
    out = io.StringIO()
    return LiveView("demo", 10, Console(file=out, width=80)), out


# Files


def test_each_record_is_one_json_line_on_disk_at_once(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.log("eval", 0, {"eval/math/pass@1": 0.25})
    recorder.samples(3, [ROW])
    (found,) = lines(tmp_path / "metrics.jsonl")
    assert (found["kind"], found["step"], found["metrics"]) == ("eval", 0, {"eval/math/pass@1": 0.25})
    assert lines(tmp_path / "samples.jsonl") == [{**ROW, "step": 3}]
    recorder.close()


def test_a_number_that_is_not_finite_is_null_and_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(tmp_path)
    with caplog.at_level(logging.WARNING):
        recorder.log("step", 7, {"train/loss": math.nan, "train/kl": -math.inf, "train/lr": 0.1})
    recorder.samples(7, [{**ROW, "reward": math.nan}])
    recorder.close()
    assert lines(tmp_path / "metrics.jsonl")[0]["metrics"] == {"train/loss": None, "train/kl": None, "train/lr": 0.1}
    assert lines(tmp_path / "samples.jsonl")[0]["reward"] is None
    assert "step 7: train/loss is nan" in caplog.text


def test_a_response_with_half_a_surrogate_pair_is_kept(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.samples(1, [{**ROW, "response": "a\ud83d é"}])
    recorder.close()
    assert lines(tmp_path / "samples.jsonl")[0]["response"] == "a? é"


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    with pytest.raises(ValueError, match="kind must be one of step, eval, got 'train'"):
        recorder.log("train", 1, {})
    recorder.close()


def test_tensorboard_reads_the_scalars_back(tmp_path: Path) -> None:
    record(tmp_path, 2)
    assert scalars(tmp_path, "reward/mean") == [(1, 0.5), (2, 1.0)]


def test_a_folder_with_records_is_refused_without_append(tmp_path: Path) -> None:
    record(tmp_path, 1)
    with pytest.raises(ObserveError, match="already holds records"):
        Recorder(tmp_path)


# Resume


def test_after_a_rewind_nothing_appears_twice(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.log("step", 1, {"reward/mean": 0.125})
    recorder.samples(1, [ROW])
    offsets = recorder.offsets()
    recorder.log("step", 2, {"reward/mean": 0.25})
    recorder.samples(2, [ROW])
    recorder.close()

    rewind(tmp_path, offsets)
    recorder = Recorder(tmp_path, append=True)
    assert recorder.offsets() == offsets
    recorder.log("step", 2, {"reward/mean": 0.5})
    recorder.close()
    assert [(found["step"], found["metrics"]["reward/mean"]) for found in lines(tmp_path / "metrics.jsonl")] == [
        (1, 0.125),
        (2, 0.5),
    ]
    assert [row["step"] for row in lines(tmp_path / "samples.jsonl")] == [1]
    assert scalars(tmp_path, "reward/mean") == [(1, 0.125), (2, 0.5)]


def test_a_file_shorter_than_its_offset_is_refused_and_no_file_is_cut(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("0123456789")
    with pytest.raises(ObserveError, match=r"samples\.jsonl has 0 bytes, the checkpoint was saved at 5"):
        rewind(tmp_path, {"metrics.jsonl": 4, "samples.jsonl": 5})
    assert (tmp_path / "metrics.jsonl").read_text() == "0123456789"


# Sinks


def test_a_sink_that_is_not_installed_names_itself_and_its_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ObserveError, match="'wandb'.*pip install wandb"):
        Recorder(tmp_path, sinks=["wandb"])


def test_an_unknown_sink_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ObserveError, match="unknown sink 'mlflow'; known: wandb, trackio"):
        Recorder(tmp_path, sinks=["mlflow"])


def test_a_sink_that_fails_is_dropped_and_the_files_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def log(self, metrics: dict, step: int) -> None:
            raise ConnectionError("service is gone")

        def finish(self) -> None:
            raise AssertionError("dropped before")

    monkeypatch.setitem(metrics.SINKS, "broken", lambda run_dir, name, config, append: Broken())
    recorder = Recorder(tmp_path, sinks=["broken"])
    recorder.log("step", 1, {"train/lr": 1.0})
    recorder.log("step", 2, {"train/lr": 1.0})
    recorder.close()
    assert len(lines(tmp_path / "metrics.jsonl")) == 2
    assert caplog.text.count("sink broken failed and is dropped") == 1


# Reading back


def test_a_torn_last_line_of_a_live_run_is_passed_over(tmp_path: Path) -> None:
    record(tmp_path, 2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    assert [step for step, _ in read_run(tmp_path).steps] == [1, 2]


def test_a_step_recorded_twice_counts_once_with_the_later_values(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for value in (0.1, 0.2):
        recorder.log("step", 1, {"reward/mean": value})
    recorder.log("eval", 1, {"eval/a/pass@1": 0.5})
    recorder.log("eval", 1, {"eval/b/pass@1": 0.6})
    recorder.close()
    run = read_run(tmp_path)
    assert run.steps == [(1, {"reward/mean": 0.2})]
    assert run.evals == [(1, {"eval/a/pass@1": 0.5, "eval/b/pass@1": 0.6})]


def test_a_change_has_first_last_and_best_by_set(tmp_path: Path) -> None:
    evals = [(0, {"eval/a/b/pass@1": 0.2, "eval/a/b/prompts": 50.0}), (5, {"eval/a/b/pass@1": 0.6})]
    (change,) = changes([*evals, (9, {"eval/a/b/pass@1": 0.5})])
    assert (change.eval_set, change.metric, change.prompts) == ("a/b", "pass@1", 50)
    assert (change.before, change.after, change.best, change.better) == (0.2, 0.5, (5, 0.6), True)
    assert change.difference == "+30.0 pts"


def test_thinning_keeps_peaks_of_maxima_and_means_of_the_rest() -> None:
    records = [(step, {"a_max": float(step == 7), "a": float(step)}) for step in range(10)]
    assert max(value for _, value in curve(records, "a_max", 2)) == 1.0
    assert curve(records, "a", 2) == [(2, 2.0), (7, 7.0)]
    assert thin([(0, math.nan), (1, 4.0)], 1) == [(1, 4.0)]


def test_phases_share_the_time_of_a_step_and_the_rest_is_other() -> None:
    table = phase_table([(1, {"time/step": 10.0, "time/rollout": 6.0, "time/train": 3.0}), (2, {"time/rollout": 2.0})])
    assert [(phase.name, phase.mean, phase.total) for phase in table] == [
        ("rollout", 4.0, 8.0),
        ("train", 3.0, 3.0),
        ("other", 1.0, 1.0),
    ]
    assert sum(phase.share for phase in table) == pytest.approx(1)


def test_numbers_are_short() -> None:
    shown = [number(value) for value in (0.0, 3.0, 0.12345, 1e-6, 999.7, 11_234.0, 2.5e6)]
    assert shown == ["0", "3", "0.123", "1e-06", "1000", "11.2k", "2.5M"]


def test_durations_and_ticks_are_round() -> None:
    assert [duration(seconds) for seconds in (0.4, 59.97, 187, 3720, 183_600)] == [
        "0.40s", "1m00s", "3m07s", "1h02m", "2d03h",
    ]  # fmt: skip
    assert ticks(0, 1, 5) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]


# Report


def test_the_report_of_an_empty_folder_says_so(tmp_path: Path) -> None:
    page = write_report(tmp_path).read_text()
    assert "No metrics have been recorded yet" in page and "<svg" not in page


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write_report(tmp_path / "nowhere")


def test_the_report_of_one_step_has_points_and_no_nan(tmp_path: Path) -> None:
    record(tmp_path, 1, **{"train/entropy": math.nan, "train/kl": 0.0, "train/logprob_abs_diff_max": 0.0})
    page = write_report(tmp_path).read_text()
    assert '<circle class="dot' in page and "nan" not in page.lower()
    assert not list(tmp_path.glob("*.tmp"))


def test_the_report_of_many_steps_stays_small(tmp_path: Path) -> None:
    record(tmp_path, 1500)
    page = write_report(tmp_path).read_text()
    assert len(page) < 400_000 and "A point stands for 10 steps" in page


def test_the_report_shows_an_unknown_metric_under_its_prefix(tmp_path: Path) -> None:
    record(tmp_path, 2, **{"tools/calls": 3.0})
    page = write_report(tmp_path).read_text()
    assert "<h3>tools</h3>" in page and "<strong>tools/calls</strong>" in page


def test_texts_of_a_model_are_escaped_and_the_page_loads_nothing(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script><img src=http://x.test/a.png>"
    recorder = Recorder(tmp_path)
    recorder.log("step", 1, {"reward/mean": 0.0, f"{evil}/x": 1.0})
    recorder.log("eval", 1, {f"eval/{evil}/pass@1": 0.5})
    recorder.samples(1, [{**ROW, "prompt": evil, "response": evil, "answer": evil, "task": evil, "split": evil}])
    recorder.close()
    (tmp_path / "config.toml").write_text(f'name = "{evil}"\n')
    (tmp_path / "summary.json").write_text(json.dumps({evil: evil, "versions": {evil: evil}}))
    page = write_report(tmp_path).read_text()
    assert "<script" not in page and "<img" not in page
    assert "default-src 'none'" in page
    assert re.findall(r"<(?:link|iframe|object|style)[^>]*>", page) == ['<link rel="icon" href="data:,">', "<style>"]
    assert "url(" not in page and "@import" not in page


def test_the_report_has_headline_config_versions_and_both_ends_of_the_samples(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for step, score in ((0, 0.25), (4, 0.5)):
        recorder.log("eval", step, {"eval/math/pass@1": score, "eval/math/prompts": 8})
        recorder.samples(step, [{**ROW, "split": "eval", "response": f"said at {step}", "reward": score > 0.3}])
    recorder.samples(2, [{**ROW, "split": "eval", "response": "in between"}])
    recorder.close()
    (tmp_path / "config.toml").write_text('[model]\npath = "tiny-model"\n[judge]\napi_key = "sk-1"\nmax_tokens = "9"\n')
    (tmp_path / "summary.json").write_text('{"versions": {"vllm": "0.26.0"}}')
    page = write_report(tmp_path).read_text()
    for text in ("25.0%", "50.0%", "+25.0 pts", "tiny-model", "vllm", "0.26.0", "said at 0", "said at 4"):
        assert text in page
    assert "in between" not in page and "sk-1" not in page


def test_only_secrets_are_hidden_from_the_config() -> None:
    assert shareable('max_tokens = "9"\njudge.api_key = "k"\n') == 'max_tokens = "9"\njudge.api_key = "(hidden)"\n'


# Live view


def test_without_a_terminal_each_event_is_one_plain_line(monkeypatch: pytest.MonkeyPatch) -> None:
    view, out = plain_view(monkeypatch)
    with view:
        for step in (1, 2):
            for name, detail in (("rollout", "1/8"), ("rollout", "8/8"), ("train", "")):
                view.phase(name, detail)
            view.update("step", step, {"reward/mean": 0.5, "reward/std": 0.1, "train/kl": math.nan, "time/step": 2.0})
        view.update("eval", 2, {"eval/math/pass@1": 0.25})
        view.message("saved [bold]here[/bold]")
    title, *told = out.getvalue().splitlines()
    assert title == "demo: 10 steps"
    assert told[:2] == ["rollout 1/8 …", "train …"]
    assert re.fullmatch(r"step 1/10  reward 0\.5 ±0\.1  KL -  took 2\.0s  left \S+", told[2])
    assert told[3].startswith("step 2/10")
    assert told[4:] == ["eval at step 2  math: pass@1 25.0%", "saved [bold]here[/bold]"]
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize("width", [30, 80, 140])
def test_the_panel_fits_any_width_with_any_metrics(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    out = io.StringIO()
    console = Console(file=out, width=width, height=60, force_terminal=True, color_system=None, legacy_windows=False)
    with LiveView("demo", 3, console) as view:
        view.update("step", 1, {})
        view.update("eval", 1, {"eval/math/pass@1": 0.25})
        view.update("step", 2, {"reward/mean": math.nan, "custom/thing": 4.0, "time/rollout": 1.0})
        view.phase("rollout", "3/8")
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", out.getvalue()).replace("\r", "")
    assert "custom" in shown and "math" in shown
    assert max(len(line) for line in shown.splitlines()) <= width


def test_the_time_left_follows_the_last_steps_and_counts_down() -> None:
    pace = Pace()
    assert pace.seconds_left(10, 0.0) is None
    pace.step_ended(130.0, 3, 4.0)
    assert pace.seconds_left(10, 130.0) == 28.0
    for step in range(4, 4 + Pace.WINDOW):
        pace.step_ended(100.0 + 10 * step, step, 10.0)
    assert pace.seconds_left(step + 5, 100.0 + 10 * step + 3) == 47.0


def test_a_sparkline_spans_minimum_to_maximum_and_leaves_out_gaps() -> None:
    assert spark([0.0, math.nan, 1.0], 8) == "▁ █"
    assert spark([2.0, 2.0], 8) == "▁▁"
    assert len(spark([float(value) for value in range(1000)], 10)) == 10


def test_the_closing_table_compares_first_and_last_eval() -> None:
    out = io.StringIO()
    evals = [(0, {"eval/m/pass@1": 0.25, "eval/m/prompts": 40.0}), (9, {"eval/m/pass@1": 0.5, "eval/m/prompts": 40.0})]
    Console(file=out, width=100).print(before_after_table(evals))
    (row,) = [line for line in out.getvalue().splitlines() if "pass@1" in line]
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["m", "pass@1", "25.0%", "50.0%", "+25.0 pts", "40"]
