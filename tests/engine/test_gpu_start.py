"""What the engine of GPUs starts with, over a stand-in for the CUDA library."""

import pytest

from jax_turbobus import gpu


class _Library:
    """Two GPUs that reach each other; NVML does not show them."""

    def gpus(self):
        return [{"uuid": "aaaa"}, {"uuid": "bbbb"}]

    def can_access_peer(self, relay, peer):
        return True

    def start(self, paths, settings):
        self.started = paths, settings

    def take_messages(self):
        return []


@pytest.fixture
def library(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_TURBOBUS_PROFILE", str(tmp_path / "none.json"))
    monkeypatch.setattr(gpu, "_engine", None)
    return _Library()


def test_every_gpu_has_its_own_link_and_the_neighbours(library):
    gpu.start(library)
    paths, settings = library.started
    assert [path[:3] for path in paths] == [
        (g, relay, direction)
        for g in range(2)
        for direction in ("h2d", "d2h")
        for relay in (None, 1 - g)
    ]
    assert len({rate for *_, rate in paths}) == 1  # nobody knows better
    assert settings["is_traced"] is False
    assert any("NVML shows" in remark for remark in gpu.engine().remarks)


@pytest.mark.parametrize("switch", ["PEER_ACCESS", "TOP"])
def test_what_the_library_reads_is_checked_at_every_start(library, monkeypatch, switch):
    monkeypatch.setenv(f"JAX_TURBOBUS_{switch}", "none")
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{switch}: expected 1 or 0, got 'none'"):
            gpu.start(library)
    assert not hasattr(library, "started")
    monkeypatch.setenv(f"JAX_TURBOBUS_{switch}", " Off ")
    gpu.start(library)


def test_disabled_has_own_links_only(library, monkeypatch):
    monkeypatch.setenv("JAX_TURBOBUS_DISABLE", "1")
    gpu.start(library)
    paths, settings = library.started
    assert {relay for _, relay, *_ in paths} == {None}
    assert settings["is_disabled"]
