"""Files of live counters: what is no page is ignored, and none harms its reader."""

import json
import os
import struct
import time

import pytest

import jax_turbobus
from jax_turbobus.commands import _live_pages, _live_view

HEADER_BYTES = ROW_BYTES = 128

pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture
def real_page(folder):
    """The bytes of a page, and its file's name, with a directory of its own."""
    with jax_turbobus.configured(topology="2xh200"):
        [page] = _live_pages.read_pages(folder.parent)
        content = page.path.read_bytes()
        name = page.path.name
    return content, name


def change(content, offset, layout, value):
    changed = bytearray(content)
    struct.pack_into(layout, changed, offset, value)
    return bytes(changed)


def test_files_that_are_no_pages_are_ignored(folder, real_page):
    content, name = real_page
    path = folder / name
    good = [page for page in [_read(path, content)] if page is not None]
    assert len(good) == 1
    assert len(good[0].rows) == (len(content) - HEADER_BYTES) // ROW_BYTES
    bad = {
        "empty": b"",
        "short": content[:100],
        "a row short": content[:-ROW_BYTES],
        "a byte short": content[:-1],
        "garbage": bytes(range(256)) * 8,
        "no magic": b"\0" * 8 + content[8:],
        "other version": change(content, 8, "<I", 2),
        "other header": change(content, 12, "<I", 64),
        "rows of no size": change(content, 16, "<I", 0),
        "too many rows": change(content, 20, "<I", 0xFFFFFFFF),
        "no such kind": change(content, 24, "<I", 9),
        "another's": change(content, 32, "<q", 1),
    }
    for what, wrong in bad.items():
        assert _read(path, wrong) is None, what
    path.unlink()
    path.symlink_to(folder.parent / "elsewhere")
    (folder.parent / "elsewhere").write_bytes(content)
    assert _live_pages.read_pages(folder.parent) == []
    path.unlink()
    os.mkfifo(path)
    assert _live_pages.read_pages(folder.parent) == []
    path.unlink()
    path.mkdir()
    (folder / "notes.txt").write_bytes(content)
    (folder / name.replace(".", ".x", 1)).write_bytes(content)
    assert _live_pages.read_pages(folder.parent) == []
    assert (folder / "notes.txt").exists()


def _read(path, content):
    path.write_bytes(content)
    pages = _live_pages.read_pages(path.parent.parent)
    return pages[0] if pages else None


def test_what_a_page_says_cannot_harm_the_reader(folder, real_page):
    content, name = real_page
    hostile = bytearray(content)
    hostile[HEADER_BYTES : HEADER_BYTES + 48] = b"\x1b[2J\xff\n\xe2\x80\xae".ljust(
        48, b"x"
    )
    struct.pack_into("<q", hostile, 40, -5)
    struct.pack_into("<d", hostile, HEADER_BYTES + 64, float("nan"))
    struct.pack_into("<q", hostile, HEADER_BYTES + 72, -(2**63))
    struct.pack_into("<q", hostile, HEADER_BYTES + 88, 2**63 - 1)
    (folder / name).write_bytes(hostile)
    watch = _live_view.Watch(folder.parent)
    watch.look()
    [process] = watch.look()
    row = process.lanes[0].row
    assert (row.num_bytes, row.bandwidth_bytes_per_s) == (0, 0)
    assert process.page.num_in_flight == 0
    assert all(line.isprintable() for line in _live_view.lines([process]))
    json.loads(json.dumps(process.as_json(), allow_nan=False))


def test_a_folder_open_to_others_is_not_looked_into(folder, real_page):
    content, name = real_page
    (folder / name).write_bytes(content)
    assert len(_live_pages.read_pages(folder.parent)) == 1
    folder.chmod(0o770)
    assert _live_pages.read_pages(folder.parent) == []
    folder.chmod(0o700)
    other = folder.rename(folder.parent / "other")
    folder.symlink_to(other)
    assert _live_pages.read_pages(folder.parent) == []


def test_an_engine_that_took_the_name_of_another_has_no_rate(folder, real_page):
    content, name = real_page
    watch = _live_view.Watch(folder.parent)
    (folder / name).write_bytes(change(content, HEADER_BYTES + 72, "<q", 1000))
    assert watch.look()[0].lanes[0].bytes_per_s is None
    (folder / name).write_bytes(change(content, HEADER_BYTES + 72, "<q", 10))
    assert watch.look()[0].lanes[0].bytes_per_s is None
    (folder / name).write_bytes(change(content, HEADER_BYTES + 72, "<q", 2000))
    assert watch.look()[0].lanes[0].bytes_per_s > 0


def test_engines_of_gpus_show_what_they_issued_and_which_relays_rest(folder, real_page):
    content, name = real_page
    row = HEADER_BYTES + ROW_BYTES  # the first relay
    streams = change(content, 24, "<I", 0)
    streams = change(streams, 40, "<q", 1)
    streams = change(streams, 56, "<q", time.monotonic_ns() - 5 * 10**9)
    (folder / name).write_bytes(streams)
    watch = _live_view.Watch(folder.parent)
    watch.look()
    streams = change(streams, row + 88, "<q", 10**9)
    (folder / name).write_bytes(change(streams, row + 96, "<I", 1))
    [process] = watch.look()
    assert process.lanes[1].bytes_per_s > 0
    heading, line = _live_view.lines([process], width=200)
    assert "as of 5 s ago" in heading
    assert "1.00 GB in flight" in line
    assert "backed off" in line
    (folder / name).write_bytes(change(streams, row + 96, "<I", 2))
    assert "dropped" in _live_view.lines(watch.look(), width=200)[1]
