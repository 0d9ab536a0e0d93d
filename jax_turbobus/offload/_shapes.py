"""What the offload primitives return, and how their dimensions correspond.

A function ``*_aval`` gives the type of the result from those of the operands: shape,
dtype, sharding and memory. ``*_dims`` gives the names of the operands' and the result's
dimensions, and those along which they cannot be split (`_partition`).
"""

from typing import Any

import jax

from jax_turbobus.offload._define import DEVICE, HOST, dims_of, row_aval
from jax_turbobus.offload._partition import Dims

__all__ = [
    "buffer_aval",
    "buffer_dims",
    "done_aval",
    "done_dims",
    "fetch_aval",
    "fetch_dims",
    "fetch_rows_aval",
    "into_aval",
    "place_aval",
    "place_dims",
    "store_aval",
    "store_dims",
    "to_device_aval",
    "to_host_aval",
]


def to_device_aval(x: Any, **_: Any) -> Any:
    return x.update(memory_space=DEVICE)


def to_host_aval(x: Any, **_: Any) -> Any:
    return x.update(memory_space=HOST)


def into_aval(x: Any, out: Any, **_: Any) -> Any:
    del x
    return out.update(memory_space=HOST, weak_type=False)


def fetch_aval(stack: Any, index: Any, *, axis: int) -> Any:
    del index
    return row_aval(stack, axis)


def store_aval(stack: Any, index: Any, row: Any, *, axis: int) -> Any:
    del index, row, axis
    return stack.update(memory_space=HOST, weak_type=False)


def place_aval(row: Any, index: Any, *, axis: int, length: int, **_: Any) -> Any:
    del index
    spec = list(row.sharding.spec) + [None] * (row.ndim - len(row.sharding.spec))
    spec.insert(axis, None)
    return row.update(
        shape=(*row.shape[:axis], length, *row.shape[axis:]),
        sharding=row.sharding.update(spec=jax.sharding.PartitionSpec(*spec)),
        memory_space=HOST,
        weak_type=False,
    )


def done_aval(buffer: Any, *read: Any, target: str, num_marks: int = 0) -> Any:
    del read, target, num_marks
    return buffer


def fetch_dims(
    stack: Any, index: Any, *, axis: int
) -> tuple[list[Dims], Dims, tuple[str, ...]]:
    del index
    dims = dims_of(stack)
    return [dims, ()], dims[:axis] + dims[axis + 1 :], (dims[axis],)


def store_dims(
    stack: Any, index: Any, row: Any, *, axis: int
) -> tuple[list[Dims], Dims, tuple[str, ...]]:
    operands, row_dims, whole = fetch_dims(stack, index, axis=axis)
    del row
    return [*operands, row_dims], operands[0], whole


def place_dims(
    row: Any, index: Any, *, axis: int, **_: Any
) -> tuple[list[Dims], Dims, tuple[str, ...]]:
    del index
    dims = dims_of(row)
    return [dims, ()], (*dims[:axis], "rows", *dims[axis:]), ("rows",)


def fetch_rows_aval(stack: Any, indices: Any, *, axis: int) -> Any:
    row = row_aval(stack, axis)
    spec = jax.sharding.PartitionSpec(None, *row.sharding.spec)
    return row.update(
        shape=(*indices.shape, *row.shape), sharding=row.sharding.update(spec=spec)
    )


def buffer_aval(x: Any, *others: Any, sizes: tuple[int, ...]) -> Any:
    del others
    spec = (*(None,) * len(sizes), *x.sharding.spec)
    return x.update(
        shape=(*sizes, *x.shape),
        sharding=x.sharding.update(spec=jax.sharding.PartitionSpec(*spec)),
        memory_space=DEVICE,
    )


def buffer_dims(
    x: Any, *others: Any, sizes: tuple[int, ...]
) -> tuple[list[Dims], Dims, tuple[str, ...]]:
    dims = dims_of(x)
    operands = [dims]
    for n, other in enumerate(others):
        operands.append(tuple(f"other{n}_{d}" for d in range(other.ndim)))
    added = tuple(f"added{n}" for n in range(len(sizes)))
    return operands, (*added, *dims), added


def done_dims(
    buffer: Any, *read: Any, target: str, num_marks: int = 0
) -> tuple[list[Dims], Dims, tuple[str, ...]]:
    del target, num_marks
    dims = dims_of(buffer)
    operands = [dims]
    for r, aval in enumerate(read):
        operands.append(
            dims
            if aval.shape == buffer.shape
            else tuple(f"r{r}_{d}" for d in range(aval.ndim))
        )
    return operands, dims, ()
