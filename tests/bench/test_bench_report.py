"""The frame that all benchmarks share."""

import json
import sys
import types

import pytest

from jax_turbobus.__main__ import main
from jax_turbobus.bench import _report
from jax_turbobus.bench._report import Row


def test_bound_is_on_the_ratio_where_there_is_a_peer():
    row = Row.make("a", "s", 2.0, peer=10.0, peer_name="jax", required="<= 0.3")
    assert row.ratio == pytest.approx(0.2)
    assert row.ok is True
    assert Row.make("a", "s", 4.0, peer=10.0, peer_name="jax", required="<= 0.3").failed


def test_bound_is_on_our_figure_where_there_is_no_peer():
    assert Row.make("a", "1/s", 2e6, required=">= 1e6").ok is True
    assert Row.make("a", "1/s", 9e5, required=">= 1e6").ok is False
    assert Row.make("a", "1/s", 1.0).ok is None


def test_a_failure_fails_whatever_its_figure_is():
    row = Row.failure("a", "failed", "why", ours=2.0, required="<= 3")
    assert row.failed
    assert (row.ours, row.required, row.note) == (2.0, "<= 3", "why")
    assert Row.failure("a", "interrupted").failed
    assert "NOT MET why" in _report.table([row])


def test_equality_can_be_asked():
    assert Row.make("a", "s", 2.0, peer=2.0, peer_name="p", required="== 1").ok is True
    assert Row.make("a", "s", 0.0, peer=2.0, peer_name="p", required="== 1").failed


@pytest.mark.parametrize("required", ["0.3", "~ 0.3", "<=0.3", "<= x"])
def test_bound_that_is_none_is_refused(required):
    with pytest.raises(ValueError, match=r"required|could not convert"):
        Row.make("a", "s", 1.0, required=required)


def test_peer_needs_a_name():
    with pytest.raises(ValueError, match="peer_name"):
        Row.make("a", "s", 1.0, peer=1.0)


def test_alternate_runs_each_once_a_round_and_swaps_the_order():
    calls = []
    timings = _report.alternate(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
        rounds=3,
        warmup=1,
    )
    assert calls == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert {name: len(t.seconds) for name, t in timings.items()} == {"a": 3, "b": 3}


def test_slow_functions_are_timed_less_often(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(_report.time, "perf_counter", lambda: now[0])

    def slow():
        now[0] += 10

    for limit_s, warmed, measured in ((0, 1, 3), (35, 2, 3), (1000, 2, 5)):
        now[0] = 0.0
        timing = _report.alternate({"a": slow}, rounds=5, limit_s=limit_s)["a"]
        assert timing.seconds == (10,) * measured
        assert now[0] == 10 * (warmed + measured)


def test_rows_say_what_a_program_held_only_where_they_know():
    row = Row.make("a", "s", 1.0, program={"layers": 8}, note="n")
    assert row.to_json()["program"] == {"layers": 8}
    assert Row(**row.to_json()) == row
    bare = Row.make("a", "s", 1.0)
    assert not {"program", "note"} & bare.to_json().keys()
    assert Row(**bare.to_json()) == bare
    assert _report.table([row, bare]).splitlines()[1].endswith("  n")


def test_json_has_a_header_and_a_row_a_line(tmp_path):
    rows = [Row.make("a", "s", 1.0), Row.make("b", "s", 2.0, peer=1.0, peer_name="p")]
    path = tmp_path / "machine" / "x.json"
    _report.write_json(path, rows, _report.header())
    text = path.read_text()
    report = json.loads(text)
    assert [row["case"] for row in report["rows"]] == ["a", "b"]
    assert sum('"case"' in line for line in text.splitlines()) == 2
    assert set(report["header"]) == {"command", "machine", "versions", "date"}
    assert set(report["header"]["versions"]) >= {"jax", "jaxlib", "python"}


@pytest.fixture
def suite(monkeypatch):
    """A stand-in for the `sched` suite whose only row misses its bound."""
    module = types.ModuleType("jax_turbobus.bench.sched")
    module.add_arguments = lambda parser: parser.add_argument("--figure", type=float)
    module.run = lambda args: [Row.make("a", "s", args.figure, required="<= 1")]
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("suite")
def test_command_fails_on_a_missed_figure_unless_told_not_to(tmp_path, capsys):
    assert main(["bench", "sched", "--figure", "0.5"]) == 0
    assert main(["bench", "sched", "--figure", "2"]) == 1
    assert "NOT MET" in capsys.readouterr().out
    path = tmp_path / "x.json"
    assert (
        main(["bench", "sched", "--figure", "2", "--no-check", "--json", str(path)])
        == 0
    )
    assert json.loads(path.read_text())["rows"][0]["ok"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("offload --rounds 0", "--rounds: expected a whole number from 1 to"),
        ("offload --max-mib -1", "--max-mib: expected a whole number from 0 to"),
        ("sched --blocks 0", "--blocks: expected a whole number from 1 to"),
        ("sched --blocks -5", "--blocks: expected a whole number from 1 to"),
        (
            "sched --json /dev",
            "--json: expected a file that can be written, got",
        ),
        ("sched --json /dev/null/x", "'/dev/null' is no folder; give another file"),
        ("placement --route nope", "--route: expected uniform, zipf:EXPONENT, one-h"),
        ("placement --topology x", "--topology: expected one of 4xrtx4090, 8xh800"),
        ("placement --markdown /dev/null", "--markdown: expected <!-- bench placeme"),
        ("experts --tokens 63", "--tokens: expected a multiple of the 4 devices"),
        ("experts --tokens 0", "--tokens: expected a whole number from 1 to"),
        ("experts --route nope", "--route: expected uniform, zipf:EXPONENT, one-hot"),
        ("experts --route zipf:nan", "--route: expected zipf:EXPONENT with one from"),
        ("experts --slack x", "--slack: expected positive numbers or 'dropless'"),
        ("experts --slack 1.25,inf", "--slack: expected positive numbers or 'drop"),
        ("experts --only nope", "--only: expected one of allgather_filter"),
        ("experts --schedule nope", "--schedule: expected one of auto, packed"),
        (
            "experts --experts 6",
            "--experts: expected a multiple of the 4 devices",
        ),
        ("experts --topk 9 --experts 8", "--topk: expected a whole number from 1 to 8"),
        ("experts --dtype float33", "--dtype: expected one of float32"),
        ("experts --dtype int4", "--dtype: expected one of float32"),
        ("experts --rounds 0", "--rounds: expected a whole number from 1 to"),
        ("experts --layers 0", "--layers: expected a whole number from 1 to"),
        ("experts --seed -1", "--seed: expected a whole number from 0 to"),
    ],
)
def test_options_that_cannot_be_are_one_line_and_status_2(arguments, message, capsys):
    assert main(["bench", *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("bench: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
