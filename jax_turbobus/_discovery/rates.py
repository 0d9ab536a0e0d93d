"""What a link carries in practice, estimated from its generation and width.

Copies of large blocks reach a fraction of the nominal rate. The fractions below
come from measured machines: PCIe 5.0 x16 55.3 GB/s and 18 NVLink 4 bricks
395.5 GB/s (two H200, driver 580.159.04, 2026-11-30, 2 GiB copies); PCIe 3.0 and
4.0 and older NVLink from published copies of V100 and RTX 3090. `profile`
replaces estimates by this machine's own figures.
"""

__all__ = [
    "NVLINK_LATENCY_NS",
    "PCIE_LATENCY_NS",
    "UPI_LATENCY_NS",
    "nvlink_bytes_per_s",
    "pcie_bytes_per_s",
    "upi_bytes_per_s",
]

# Usable bytes a second of one lane, one direction.
_PCIE_LANE = {
    1: 0.19e9,
    2: 0.39e9,
    3: 0.78e9,
    4: 1.64e9,
    5: 3.456e9,
    6: 6.9e9,
}
# Nominal bytes a second of one brick, one direction, and what is usable of it.
_NVLINK_BRICK = {1: 20e9, 2: 25e9, 3: 25e9, 4: 26.5625e9, 5: 53.125e9}
_NVLINK_USABLE = {1: 0.93, 2: 0.95, 3: 0.93}
_NVLINK_USABLE_FROM_4 = 0.827

# Of a 4 KiB copy on a link (2.9 us measured, the launch included).
PCIE_LATENCY_NS = 2000
NVLINK_LATENCY_NS = 2000
UPI_LATENCY_NS = 300

_UPI_BETWEEN_SOCKETS = 40e9
_UPI_WITHIN_SOCKET = 100e9
# Kernel distances: 10 is a node's own memory, 20 and more another socket's.
_SAME_SOCKET_DISTANCE = 15


def pcie_bytes_per_s(generation: int, width: int) -> float:
    """Returns the usable rate, one direction; zeros are taken as 3 and 16."""
    generation = min(generation, max(_PCIE_LANE)) or 3
    return _PCIE_LANE[generation] * (width or 16)


def nvlink_bytes_per_s(generation: int, nominal: float | None = None) -> float:
    """Returns the usable rate of one brick, one direction.

    Args:
      generation: of NVLink; 0: unknown, taken as 2.
      nominal: bytes a second as the driver gives them; None: by generation.
    """
    generation = min(generation, max(_NVLINK_BRICK)) or 2
    usable = _NVLINK_USABLE.get(generation, _NVLINK_USABLE_FROM_4)
    return (nominal or _NVLINK_BRICK[generation]) * usable


def upi_bytes_per_s(distance: int | None) -> float:
    """Returns a guess at what two NUMA nodes pass each other, one direction.

    Args:
      distance: the kernel's; None: unknown.
    """
    is_near = distance is not None and distance <= _SAME_SOCKET_DISTANCE
    return _UPI_WITHIN_SOCKET if is_near else _UPI_BETWEEN_SOCKETS
