"""Lets the tests here import their helpers, whatever pytest's import mode."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
