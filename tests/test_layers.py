"""An include or import against the arrows below fails here."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent

# part -> parts whose headers it may include (besides its own).
CC_ARROWS = {
    "base": set(),
    "topo": {"base"},
    "sched": {"topo", "base"},
    "transport": {"topo", "base"},
    "engine": {"sched", "transport", "topo", "base"},
    "moe": {"transport", "topo", "base"},
    "offload": {"engine", "sched", "transport", "topo", "base"},
    "ffi": {"offload", "engine", "moe", "sched", "transport", "topo", "base"},
    "python": {"ffi", "engine", "moe", "sched", "transport", "topo", "base"},
}
PURE = {"topo", "sched"}
IMPURE_HEADER = re.compile(r"cuda|xla/|sys/socket|^(thread|mutex|chrono|atomic)$")

# package part -> parts it may import. Everything may import ANYWHERE.
ANYWHERE = {
    "config",
    "errors",
    "_compat",
    "_environment",
    "_observe",
    "gpu",
    "topology",
}
FEATURES = {"offload", "moe", "sim", "node", "profile"}
PY_ARROWS = {
    "errors": set(),
    "_compat": {"errors"},
    "_environment": set(),
    "_ffi": {"_core", "_cuda"},
    "_profile_exchange": set(),
    "_profile_file": {"_profile_exchange", "_version"},
    "_version": set(),
    "_gpu_paths": {"_profile_file"},
    "gpu": {"_gpu_paths", "_profile_file"},
    "_settings": set(),
    "config": {"_ffi", "_settings"},
    "_observe": {"_ffi", "_trace_format"},
    "_trace_format": set(),
    "_discovery": set(),
    "topology": {"_ffi", "_discovery"},
    "_export": {"_ffi"},
    "offload": {"_ffi", "_export"},
    "moe": {"_ffi", "_export"},
    "sim": {"_ffi"},
    "node": {"_ffi"},
    "_measure_exchange": {"_profile_exchange", "moe"},
    "profile": {
        "_ffi",
        "_measure_exchange",
        "_profile_exchange",
        "_profile_file",
        "_version",
    },
    "bench": {"_ffi", *FEATURES},
    "demo": {"bench", *FEATURES},
    "commands": {"_ffi", "_discovery", "bench", "demo", *FEATURES},
}


def cc_files():
    return [p for p in (ROOT / "cc").rglob("*") if p.suffix in {".h", ".cc", ".cu"}]


@pytest.mark.parametrize("path", cc_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_cc_includes_follow_the_arrows(path):
    part = path.relative_to(ROOT / "cc").parts[0]
    assert part in CC_ARROWS, f"{part}: a part that no arrow names"
    for header in re.findall(r'^#include\s+"([^"]+)"', path.read_text(), re.M):
        target = header.split("/")[0]
        if target == "xla":
            assert part in {"ffi", "python"}, f"{path}: only ffi knows XLA"
        elif (ROOT / "cc" / target).is_dir():
            allowed = CC_ARROWS[part] | {part}
            assert target in allowed, f"{path}: {part} must not include {header}"


@pytest.mark.parametrize("part", sorted(PURE))
def test_pure_parts_know_no_thread_clock_socket_or_device(part):
    for path in (ROOT / "cc" / part).rglob("*"):
        if path.suffix not in {".h", ".cc"} or path.stem.endswith("_test"):
            continue
        for header in re.findall(r"^#include\s+[<\"]([^>\"]+)", path.read_text(), re.M):
            assert not IMPURE_HEADER.search(header), f"{path} includes {header}"


def imported_parts(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            pytest.fail(f"{path}: relative import; write the full name")
        else:
            continue
        for name in names:
            pieces = name.split(".")
            if pieces[0] == "jax_turbobus" and len(pieces) > 1:
                yield pieces[1]


def python_files():
    return sorted((ROOT / "jax_turbobus").rglob("*.py"))


@pytest.mark.parametrize("path", python_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_python_imports_follow_the_arrows(path):
    part = path.relative_to(ROOT / "jax_turbobus").with_suffix("").parts[0]
    if part in {"__init__", "__main__"}:
        return
    assert part in PY_ARROWS, f"{part}: a part that no arrow names"
    known = set(PY_ARROWS) | {"_core", "_cuda"}
    for target in imported_parts(path):
        if target in known:
            allowed = PY_ARROWS[part] | ANYWHERE | {part}
            assert target in allowed, f"{path}: {part} must not import {target}"


def test_private_jax_is_touched_in_one_place():
    for path in python_files():
        if path.name != "_compat.py":
            assert "jax._src" not in path.read_text(), path


def test_no_stream_formats_numbers():
    # A statically linked libstdc++ beside XLA's own crashes in its locale facets
    # (seen with GCC 13): messages are made with std::to_string.
    for path in cc_files():
        if not path.stem.endswith("_test") and "test" not in path.parts:
            assert "stringstream" not in path.read_text(), path
