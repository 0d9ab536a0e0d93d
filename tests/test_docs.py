"""What prose refers to is there: files behind links, and sections by their titles."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("cc/**/*.md"),
    *ROOT.glob("tests/**/*.md"),
]
SOURCES = [
    path
    for folder, ends in (("cc", "cc h cu cuh"), ("jax_turbobus", "py"), ("tests", "py"))
    for end in ends.split()
    for path in ROOT.glob(f"{folder}/**/*.{end}")
]


def names_of(paths):
    return [str(path.relative_to(ROOT)) for path in paths]


def titles_of(page):
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    bold = re.findall(r"\*\*(.*?)\.?\*\*", page.read_text())
    return [re.sub(r"[`*]", "", title) for title in titles + bold]


def sections_named(text):
    """Returns (page, title) of each reference: a page's name, then a quoted title."""
    # Comments and docstrings wrap anywhere.
    text = re.sub(r"\s*\n\s*(?:///?|#|\*)?\s*", " ", text)
    pattern = r'(?:docs/|\()?(\w+\.md)\)?, "([^"]+)"'
    return re.findall(pattern, text)


@pytest.mark.parametrize("name", names_of(PAGES))
def test_links_lead_to_files(name):
    page = ROOT / name
    for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_sections_that_are_named_exist():
    found = 0
    for path in (*PAGES, *SOURCES):
        for file, title in sections_named(path.read_text()):
            page = ROOT / "docs" / file
            page = page if page.exists() else ROOT / file
            assert page.exists(), f"{path}: {file}"
            plain = re.sub(r"[`*]", "", title)
            assert any(t.startswith(plain) for t in titles_of(page)), f"{path}: {title}"
            found += 1
    assert found > 10
