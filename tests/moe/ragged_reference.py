"""`ragged_all_to_all` row by row in NumPy, and random slices for it."""

import numpy as np


def slow(operand, output, fields):
    """Rank by rank, slice by slice, row by row; arrays have the rank in front."""
    ranks = operand.shape[0]
    input_offsets, send_sizes, output_offsets, recv_sizes = fields
    each = send_sizes.shape[1] // ranks
    result = output.copy()
    for destination in range(ranks):
        for source in range(ranks):
            for j in range(each):
                i = destination * each + j
                assert (
                    send_sizes[source, i] == recv_sizes[destination, source * each + j]
                )
                for row in range(send_sizes[source, i]):
                    result[destination, output_offsets[source, i] + row] = operand[
                        source, input_offsets[source, i] + row
                    ]
    return result


def slow_gradients(cotangent, operand_rows, fields):
    """Each row of the result gives its cotangent to the last one who wrote it."""
    ranks = cotangent.shape[0]
    input_offsets, send_sizes, output_offsets, _ = fields
    each = send_sizes.shape[1] // ranks
    wide = np.result_type(cotangent.dtype, np.float64)
    operand_bar = np.zeros((ranks, operand_rows, *cotangent.shape[2:]), wide)
    output_bar = cotangent.astype(wide)
    writer = {}
    for destination in range(ranks):
        for source in range(ranks):
            for i in range(destination * each, (destination + 1) * each):
                for row in range(send_sizes[source, i]):
                    to = (destination, output_offsets[source, i] + row)
                    writer[to] = (source, input_offsets[source, i] + row)
    for to, origin in writer.items():
        operand_bar[origin] += cotangent[to]
        output_bar[to] = 0
    return operand_bar, output_bar


def plan(seed, ranks=4, each=1, operand_rows=96, output_rows=160, overlap=False):
    """Random slices; disjoint in every result unless `overlap`."""
    rng = np.random.default_rng(seed)
    slices = ranks * each
    most = min(operand_rows, output_rows) // max(slices, 2)
    sizes = rng.integers(0, most + 1, (ranks, slices)).astype(np.int32)
    sizes[rng.random(sizes.shape) < 0.3] = 0
    if overlap:
        input_offsets = rng.integers(0, operand_rows - most, sizes.shape)
        output_offsets = rng.integers(0, output_rows - most, sizes.shape)
    else:
        input_offsets = np.cumsum(sizes, axis=1) - sizes
        arriving = sizes.reshape(ranks, ranks, each)
        gap = rng.integers(0, 3, arriving.shape)
        padded = (arriving + gap).transpose(1, 0, 2).reshape(ranks, -1)
        begin = np.cumsum(padded, axis=1) - padded
        begin = begin.reshape(ranks, ranks, each).transpose(1, 0, 2)
        output_offsets = begin.reshape(ranks, slices)
    recv_sizes = sizes.reshape(ranks, ranks, each).transpose(1, 0, 2)
    fields = (input_offsets, sizes, output_offsets, recv_sizes.reshape(sizes.shape))
    return [np.asarray(f, np.int32) for f in fields]


def values(seed, *shape, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return rng.integers(-8, 8, shape).astype(dtype)
