"""What must hold for any node, any transfers, and any order of events."""

import collections

import hypothesis
from hypothesis import given
from hypothesis import strategies as st

from jax_turbobus import _ffi
from jax_turbobus.sim._policies import CoreScheduler
from jax_turbobus.sim._types import Transfer

from ._nodes import BLOCK, CHUNK, MS, RATE, SIZES, Lane, Node, nodes, transfers_for

settings = hypothesis.settings(derandomize=True, deadline=None, max_examples=150)


class Watched(CoreScheduler):
    """A scheduler that is checked at every step."""

    def __init__(self, node):
        super().__init__(node.config())
        self.node = node
        self.left = {}
        self.transfers = {}
        self.in_flight = {}
        self.expected_ns = collections.Counter()
        self.log = []

    def submit(self, index, transfer, now_ns):
        super().submit(index, transfer, now_ns)
        self.left[index] = transfer.size_bytes
        self.transfers[index] = transfer
        self.log.append(("submit", index, None))

    def complete(self, block, now_ns):
        super().complete(block, now_ns)
        del self.in_flight[block]

    def drain(self, now_ns):
        blocks = super().drain(now_ns)
        self.native.rescan()
        more = super().drain(now_ns)
        busy = {block.lane for block in [*self.in_flight.values(), *blocks]}
        # Time alone can make it worth while to queue a block behind another, or
        # to help a lane that is late.
        idled = [
            block
            for block in more
            if block.lane not in busy and not self.is_late(block, now_ns)
        ]
        assert not idled, "a lane idled while work waited"
        blocks += more
        for block in blocks:
            lane = self.node.lanes[block.lane]
            service_ns = block.size_bytes / (self.node.rate(lane) * RATE) * 1e9
            start_ns = max(now_ns, self.expected_ns[block.lane])
            self.expected_ns[block.lane] = start_ns + service_ns
            self.left[block.transfer] -= block.size_bytes
            self.in_flight[block.id] = block
            self.log.append(("issue", block.transfer, block))
        self.check_windows()
        if not self.node.is_lock_step:
            self.check_direct_lanes_work()
        return blocks

    def is_late(self, block, now_ns):
        """Whether another lane for the block's transfer is overdue."""
        mine = self.node.lanes[block.lane]
        return any(
            (lane.gpu, lane.direction) == (mine.gpu, mine.direction)
            and self.bytes_on(i) > 0
            and now_ns >= self.expected_ns[i]
            for i, lane in enumerate(self.node.lanes)
        )

    def bytes_on(self, lane):
        return sum(b.size_bytes for b in self.in_flight.values() if b.lane == lane)

    def check_windows(self):
        staging = collections.Counter()
        for i, lane in enumerate(self.node.lanes):
            bytes_on = self.bytes_on(i)
            assert bytes_on == self.native.lane_state(i).in_flight_bytes
            assert bytes_on <= 2 * BLOCK
            if lane.gpu != lane.link:
                staging[lane.link, lane.direction] += bytes_on
        assert all(total <= 2 * BLOCK for total in staging.values())

    def check_direct_lanes_work(self):
        for i, lane in enumerate(self.node.lanes):
            if lane.gpu != lane.link or self.bytes_on(i):
                continue
            waiting = [
                index
                for index, left in self.left.items()
                if left
                and self.transfers[index].gpu == lane.gpu
                and self.transfers[index].direction == lane.direction
            ]
            assert not waiting, "a direct lane idled while its GPU's transfer waited"


def lane_of(node, block):
    return node.lanes[block.lane]


def is_relayed(node, block):
    return lane_of(node, block).gpu != lane_of(node, block).link


@st.composite
def cases(draw):
    node = draw(nodes())
    return node, draw(transfers_for(len(node.links)))


# Two bytes are left for a relay that had no room for a block.
LITTLE_LEFT = (
    Node(
        links=(0.1, 0.5, 0.3, 0.5),
        lanes=tuple(
            Lane(gpu=gpu, link=link, direction="d2h", fabric=None)
            for gpu, links in enumerate([(0, 1, 2, 3), (0, 1, 2), (2,), (0, 2, 3)])
            for link in links
        ),
        is_lock_step=False,
        latency_ns=0,
    ),
    [
        Transfer(gpu=0, size_bytes=3145730, arrival_ns=197071, direction="d2h"),
        Transfer(gpu=1, size_bytes=524249, arrival_ns=197070, direction="d2h"),
        Transfer(gpu=3, size_bytes=5938076, arrival_ns=197070, direction="d2h"),
    ],
)


@settings
@given(cases())
@hypothesis.example(LITTLE_LEFT)
def test_each_byte_is_copied_once_and_no_lane_breaks_its_window_or_idles(case):
    node, transfers = case
    _, records = node.run(transfers, Watched(node))
    copied = collections.defaultdict(list)
    for record in records:
        copied[record.transfer].append((record.offset_bytes, record.size_bytes))
    for index, transfer in enumerate(transfers):
        end = 0
        for offset, size in sorted(copied[index]):
            assert offset == end
            assert size > 0
            end += size
        assert end == transfer.size_bytes


@settings
@given(cases())
def test_the_token_passes_in_arrival_order(case):
    node, transfers = case
    watched = Watched(node)
    node.run(transfers, watched)
    arrived = {t: i for i, (event, t, _) in enumerate(watched.log) if event == "submit"}
    latest = collections.defaultdict(int)
    for event, index, block in watched.log:
        transfer = transfers[index]
        if event != "issue" or transfer.size_bytes <= CHUNK:
            continue
        if is_relayed(node, block):
            owner = (transfer.gpu, transfer.direction)
            assert arrived[index] >= latest[owner]
            latest[owner] = arrived[index]


@settings
@given(cases())
def test_a_small_transfer_waits_for_at_most_one_chunk_of_any_other(case):
    node, transfers = case
    watched = Watched(node)
    node.run(transfers, watched)
    for small, transfer in enumerate(transfers):
        if transfer.size_bytes >= BLOCK // 2:
            continue
        submitted = watched.log.index(("submit", small, None))
        ahead = collections.Counter()
        for event, index, block in watched.log[submitted:]:
            if event != "issue":
                continue
            if index == small:
                assert not is_relayed(node, block)
                break
            lane = lane_of(node, block)
            if (lane.gpu, lane.link, lane.direction) == (
                transfer.gpu,
                transfer.gpu,
                transfer.direction,
            ):
                ahead[index] += block.size_bytes
        assert all(count <= CHUNK for count in ahead.values())


@settings
@given(nodes(), st.data())
def test_pooling_one_transfer_is_never_slower_than_direct_by_more_than_a_block(
    node, data
):
    transfer = Transfer(
        gpu=data.draw(st.integers(0, len(node.links) - 1)), size_bytes=data.draw(SIZES)
    )
    (pooled,), _ = node.run([transfer])
    (direct,), _ = node.without_relays().run([transfer])
    block_ns = BLOCK / (node.links[transfer.gpu] * RATE) * 1e9
    assert pooled <= direct + block_ns + node.latency_ns + 1


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["submit", "complete", "complete", "complete", "fail", "cancel", "remove"]
        ),
        st.integers(0, 1 << 30),
        SIZES,
    ),
    max_size=60,
)


# A byte that its own link has failed on, and relays too slow for a part of it.
SLOW_RELAYS = Node(
    links=(0.25, 0.1, 0.1),
    lanes=tuple(Lane(gpu=0, link=i, direction="h2d", fabric=None) for i in range(3)),
    is_lock_step=False,
    latency_ns=0,
)


@settings
@given(nodes(), EVENTS)
@hypothesis.example(SLOW_RELAYS, [("submit", 0, 1), ("fail", 0, 1)])
def test_failures_cancellations_and_lanes_that_vanish_lose_no_byte(node, events):
    core = _ffi.core()
    scheduler = core.Scheduler(node.config())
    in_flight, removed = {}, set()
    copied = collections.defaultdict(list)
    sizes, finished, cancelled, stranded = {}, set(), set(), set()
    now_ns = 0

    def drain():
        for block in scheduler.drain(now_ns):
            assert block.lane not in removed
            assert block.transfer not in cancelled
            in_flight[block.id] = block

    def end(block_id, event):
        block = in_flight.pop(block_id)
        getattr(scheduler, event)(block_id, now_ns)
        if event == "complete":
            copied[block.transfer].append((block.offset_bytes, block.size_bytes))

    def settle():
        for transfer, was_cancelled in scheduler.take_finished():
            assert was_cancelled == (transfer in cancelled)
            finished.add(transfer)
        stranded.update(scheduler.take_stranded())

    for kind, number, size in events:
        now_ns += MS
        if kind == "submit":
            lane = node.lanes[number % len(node.lanes)]
            try:
                scheduler.submit(
                    transfer=len(sizes),
                    gpu=lane.gpu,
                    direction=getattr(core.Direction, lane.direction.upper()),
                    size_bytes=size,
                    now_ns=now_ns,
                )
            except ConnectionError:
                assert all(
                    i in removed
                    for i, other in enumerate(node.lanes)
                    if (other.gpu, other.direction) == (lane.gpu, lane.direction)
                )
            else:
                sizes[len(sizes)] = size
        elif kind in ("complete", "fail") and in_flight:
            end(sorted(in_flight)[number % len(in_flight)], kind)
        elif kind == "cancel" and sizes:
            transfer = number % len(sizes)
            if transfer not in finished | cancelled | stranded:
                cancelled.add(transfer)
                scheduler.cancel(transfer, now_ns)
        elif kind == "remove":
            lane = number % len(node.lanes)
            if lane not in removed:
                removed.add(lane)
                scheduler.remove_lane(lane, now_ns)
                for block_id in [b for b, x in in_flight.items() if x.lane == lane]:
                    del in_flight[block_id]
        settle()
        drain()

    while not scheduler.is_idle:
        if in_flight:
            now_ns += MS
            end(min(in_flight), "complete")
        else:
            wakeup_ns = scheduler.next_wakeup_ns()
            assert wakeup_ns is not None, "work is left and nothing is due"
            now_ns = max(now_ns, wakeup_ns)
        settle()
        drain()
    settle()
    assert finished | stranded == set(sizes)
    assert not finished & stranded
    for transfer, size in sizes.items():
        end_bytes = 0
        for offset, length in sorted(copied[transfer]):
            assert offset >= end_bytes, "bytes were copied twice"
            end_bytes = offset + length
        if transfer in finished - cancelled:
            assert sum(length for _, length in copied[transfer]) == size


@settings
@given(nodes(), st.data())
def test_a_gpu_that_lends_its_link_loses_no_more_than_what_was_under_way(node, data):
    """Each GPU has one transfer: what it loses is at most the two relayed blocks
    that its link was given before its own transfer came."""
    transfers = [
        Transfer(
            gpu=gpu,
            size_bytes=data.draw(SIZES),
            arrival_ns=data.draw(st.integers(0, 30 * MS)),
            direction=data.draw(st.sampled_from(["h2d", "d2h"])),
        )
        for gpu in range(len(node.links))
    ]
    pooled, _ = node.run(transfers)
    direct, _ = node.without_relays().run(transfers)
    for transfer, with_relays, without in zip(transfers, pooled, direct, strict=True):
        block_ns = BLOCK / (node.links[transfer.gpu] * RATE) * 1e9
        assert with_relays <= without + 2 * block_ns + node.latency_ns + 1
