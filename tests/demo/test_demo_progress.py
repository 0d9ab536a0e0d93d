"""The progress bar on a terminal, in a log, and where Unicode cannot be written."""

import io

from jax_turbobus.demo.progress import ProgressBar


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


class AsciiTerminal(Terminal):
    encoding = "ascii"


def test_terminal_redraws_one_line_and_ends_it():
    stream = Terminal()
    with ProgressBar(4, stream) as bar:
        bar.update(1, "loss 5.5")
        bar.update(2, "loss 5.0")  # within a tenth of a second: not drawn
        bar.update(4, "loss 4.0")
    drawn = stream.getvalue().split("\r")[1:]
    assert [line.split("|")[-1].split()[0] for line in drawn] == ["1/4", "4/4"]
    assert "█████ " in drawn[0]
    assert "█" * 20 in drawn[1]
    assert stream.getvalue().endswith("\n")


def test_terminal_without_unicode_gets_ascii():
    stream = AsciiTerminal()
    with ProgressBar(2, stream) as bar:
        bar.update(1, "")
    assert "|##########          |" in stream.getvalue()


def test_log_gets_a_line_at_each_tenth():
    stream = io.StringIO()
    with ProgressBar(100, stream) as bar:
        for done in range(1, 101):
            bar.update(done, "loss 1.0")
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == [
        f"{10 * tenth}/100" for tenth in range(1, 11)
    ]
