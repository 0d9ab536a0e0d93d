"""How `--help` looks: an option that has a default says which."""

import argparse
from typing import Any

__all__ = ["Formatter"]


def _is_silent(default: Any) -> bool:
    """Returns whether a default goes without saying: nothing, or off."""
    return default is None or default is False or default in ("", [], argparse.SUPPRESS)


class Formatter(argparse.HelpFormatter):
    """Adds "(default: ...)", where the text does not speak of a default already."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help, action.default
        if text is None or _is_silent(default) or "default" in text:
            return text
        if isinstance(default, list):
            return f"{text} (default: {' '.join(map(str, default))})"
        return f"{text} (default: %(default)s)"
