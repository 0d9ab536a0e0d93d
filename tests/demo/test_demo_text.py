"""What text the demo reads, how it is split, and how bad text is refused."""

import numpy as np
import pytest

from jax_turbobus.demo import text

CONTEXT = 16


def write(folder, name, data):
    path = folder / name
    path.write_bytes(data)
    return path


def test_standard_library_is_split_by_file():
    corpus = text.load_standard_library(CONTEXT)
    again = text.load_standard_library(CONTEXT)
    assert np.array_equal(corpus.train, again.train)
    assert corpus.num_files > 100
    share = corpus.held_out.size / (corpus.held_out.size + corpus.train.size)
    assert 0.03 < share < 0.25


def test_each_file_is_on_one_side_of_the_split(tmp_path):
    contents = [f"name_{index} = {index}\n".encode() * 40 for index in range(40)]
    for index, content in enumerate(contents):
        write(tmp_path, f"m{index}.py", content)
    corpus = text.load_standard_library(CONTEXT, tmp_path)
    train, held_out = corpus.train.tobytes(), corpus.held_out.tobytes()
    for content in contents:
        assert (content in train) != (content in held_out)
        line = content[: content.index(b"\n") + 1]
        assert (line in train) != (line in held_out)


def test_files_that_join_or_leave_do_not_move_others_across_the_split(tmp_path):
    for index in range(40):
        write(tmp_path, f"m{index}.py", f"# {index}\n".encode() * 60)
    before = text.load_standard_library(CONTEXT, tmp_path).held_out.tobytes()
    write(tmp_path, "another.py", b"x = 1\n" * 60)
    after = text.load_standard_library(CONTEXT, tmp_path).held_out.tobytes()
    assert set(before.split(b"\n")) <= set(after.split(b"\n"))


def test_tests_and_installed_packages_are_not_read(tmp_path):
    for index in range(40):
        write(tmp_path, f"m{index}.py", b"good = 1\n" * 60)
    for folder in ("test", "site-packages"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, "m.py", b"bad = 1\n" * 60)
    corpus = text.load_standard_library(CONTEXT, tmp_path)
    assert b"bad" not in corpus.train.tobytes() + corpus.held_out.tobytes()


def test_library_without_sources_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match=r"no Python sources under .*--text FILE"):
        text.load_standard_library(CONTEXT, tmp_path)


def test_one_file_is_judged_by_its_tail(tmp_path):
    data = b"".join(b"%06d\n" % i for i in range(2000))
    corpus = text.load_files([write(tmp_path, "a.txt", data)], CONTEXT)
    assert corpus.train.tobytes() + corpus.held_out.tobytes() == data
    assert corpus.held_out.size == len(data) // 10


def test_several_files_are_split_by_file(tmp_path):
    paths = [write(tmp_path, f"{c}.txt", c.encode() * 2000) for c in "abcd"]
    corpus = text.load_files(paths, CONTEXT)
    train, held_out = set(corpus.train.tobytes()), set(corpus.held_out.tobytes())
    assert train & held_out <= {ord("\n")}
    assert train | held_out == {*b"abcd", *(b"\n" if len(train) > 1 else b"")}
    assert corpus.num_files == 4


def test_a_file_given_twice_is_read_once(tmp_path):
    path = write(tmp_path, "a.txt", bytes(range(1, 251)) * 8)
    corpus = text.load_files([path, path], CONTEXT)
    assert corpus.train.size + corpus.held_out.size == 2000


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, r"--text: cannot read .*bad\.txt: No such file"),
        (b"", r"--text: .*bad\.txt is empty"),
        (b"ab\0c" * 999, r"--text: .*bad\.txt is binary \(byte 2 is zero\)"),
        (b"too short", r"--text: .*bad\.txt leaves .* bytes, expected at least 272"),
    ],
    ids=["missing", "empty", "binary", "short"],
)
def test_bad_text_is_refused_by_name(tmp_path, data, message):
    path = tmp_path / "bad.txt"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        text.load_files([path], CONTEXT)


def test_a_directory_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="is a directory"):
        text.load_files([tmp_path], CONTEXT)


def test_windows_are_the_text_and_cover_its_ends():
    data = np.arange(20, dtype=np.uint8)
    cut = text.windows(data, np.random.default_rng(0), 500, 16)
    assert cut.shape == (500, 17)
    assert np.array_equal(cut, cut[:, :1] + np.arange(17))
    assert set(cut[:, 0]) == {0, 1, 2, 3}
