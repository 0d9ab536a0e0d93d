"""Benchmarks: `python -m jax_turbobus bench {experts,offload,sched}`.

Each module here other than `_report` is one suite, with `add_arguments(parser)`
and `run(args) -> list[Row]`. Recorded runs lie under
``tests/perf/results/<machine>/``.
"""
