"""CMake and Bazel build the same sources with the same arrows."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent


def cmake_parts():
    text = (ROOT / "cc" / "CMakeLists.txt").read_text()
    calls = re.findall(r"^tb_library\(([\w/]+)(?: DEPS ([\w/ ]+))?\)", text, re.M)
    return {part: set(deps.split()) for part, deps in calls}


def bazel_targets():
    """Evaluates BUILD, which is Python as far as it goes, with recording rules."""
    libraries, tests = {}, {}

    def glob(patterns, exclude=()):
        found = {str(p.relative_to(ROOT)) for q in patterns for p in ROOT.glob(q)}
        return sorted(
            found - {str(p.relative_to(ROOT)) for q in exclude for p in ROOT.glob(q)}
        )

    def rule(into):
        return lambda **attributes: into.update({attributes["name"]: attributes})

    scope = {
        "glob": glob,
        "cc_library": rule(libraries),
        "cc_test": rule(tests),
        "load": lambda *_: None,
        "package": lambda **_: None,
    }
    exec((ROOT / "BUILD").read_text(), scope)
    return scope["PARTS"], libraries, tests


def test_both_builds_have_the_same_parts_and_arrows():
    parts, _, _ = bazel_targets()
    assert {part: set(deps) for part, deps in parts.items()} == cmake_parts()


def test_bazel_holds_every_source_of_the_core_once():
    parts, libraries, tests = bazel_targets()
    held = [src for rule in libraries.values() for src in rule["srcs"]]
    held += [src for rule in tests.values() for src in rule["srcs"]]
    on_disk = [
        str(path.relative_to(ROOT))
        for part in parts
        for path in (ROOT / "cc" / part).glob("*.cc")
    ]
    assert sorted(held) == sorted(on_disk)
    assert len(tests) >= 1


def test_no_core_source_lies_outside_the_parts():
    parts, _, _ = bazel_targets()
    homes = {f"cc/{part}" for part in parts} | {"cc/ffi", "cc/python"}
    homes |= {f"cc/{p}/cuda" for p in ("engine", "ffi", "moe", "python", "transport")}
    for path in (ROOT / "cc").rglob("*.cc"):
        assert str(path.parent.relative_to(ROOT)) in homes, path
