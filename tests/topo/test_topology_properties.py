"""Any valid file reads back and its paths hold together; no invalid one crashes."""

import json
import math

from hypothesis import given, settings
from hypothesis import strategies as st
from topo_fakes import load, valid

from jax_turbobus.topology import Topology

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=True)
    | st.sampled_from(["gpu0", "gpu1", "numa0", "sw", "nv", "pcie", "", "é", "\0"])
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


def spots(data, prefix=()):
    """Every place in a JSON value."""
    items = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    for key, value in items:
        yield (*prefix, key)
        yield from spots(value, (*prefix, key))


@settings(derandomize=True, max_examples=300, deadline=None)
@given(data=st.data())
def test_a_mutated_file_is_refused_or_reads_back(data):
    content = valid()
    for _ in range(data.draw(st.integers(1, 3))):
        places = list(spots(content))
        where = data.draw(st.sampled_from(places))
        inner = content
        for step in where[:-1]:
            inner = inner[step]
        action = data.draw(st.sampled_from(["replace", "delete", "copy"]))
        if action == "delete":
            del inner[where[-1]]
        elif action == "replace":
            inner[where[-1]] = data.draw(JSON_VALUES)
        else:
            source = content
            for step in data.draw(st.sampled_from(places)):
                try:
                    source = source[step]
                except (KeyError, IndexError, TypeError):
                    break
            inner[where[-1]] = json.loads(json.dumps(source))
        if not list(spots(content)):
            break
    message = ""
    try:
        topology = load(content)
    except ValueError as error:
        message = str(error)
    if message:
        assert message.startswith("topology m.json: ")
        assert len(message) < 1000
        return
    written = topology.to_json()
    assert Topology.from_json(written).to_json() == written


@st.composite
def machines(draw):
    """Any machine that makes sense."""
    rate = st.floats(1, 1e12)
    num_numa = draw(st.integers(1, 3))
    num_gpus = draw(st.integers(0, 5))
    num_switches = draw(st.integers(0, 2))
    numa = [f"numa{i}" for i in range(num_numa)]
    switches = [f"sw{i}" for i in range(num_switches)]
    gpus = [f"gpu{i}" for i in range(num_gpus)]

    def link(kind, a, b):
        forward, back = draw(rate), draw(rate)
        out = {"id": f"{kind}:{a}:{b}", "type": kind, "a": a, "b": b}
        out |= {"a_to_b_bytes_per_s": forward, "b_to_a_bytes_per_s": back}
        if draw(st.booleans()):
            share = draw(st.floats(0, 1))
            low, high = max(forward, back), forward + back
            out["duplex_bytes_per_s"] = min(high, low + share * (high - low))
        if draw(st.booleans()):
            out["latency_ns"] = draw(st.integers(0, 10**9))
        if draw(st.booleans()):
            out["max_width"] = draw(st.integers(1, 16))
            out["width"] = draw(st.integers(1, out["max_width"]))
        return out

    links = [link("upi", numa[i], numa[i + 1]) for i in range(num_numa - 1)]
    links += [link("pcie", draw(st.sampled_from(numa)), s) for s in switches]
    links += [link("pcie", draw(st.sampled_from(numa + switches)), g) for g in gpus]
    for i, a in enumerate(gpus):
        for b in gpus[i + 1 :]:
            if draw(st.booleans()):
                links.append(link("nvlink", a, b))
    data = {
        "format": "jax_turbobus/topology",
        "version": 1,
        "name": draw(st.text(min_size=1, max_size=9).filter(lambda s: "\0" not in s)),
        "numa_nodes": [{"id": n, "memory_bytes_per_s": draw(rate)} for n in numa],
        "switches": [{"id": s, "type": "pcie"} for s in switches],
        "gpus": [{"id": g} for g in gpus],
        "links": draw(st.permutations(links)),
    }
    if num_gpus >= 2 and draw(st.booleans()):
        data["link_groups"] = [
            {"id": "g", "gpus": gpus[:2]}
            | {"h2d_bytes_per_s": draw(rate), "d2h_bytes_per_s": draw(rate)}
        ]
    return data


@settings(derandomize=True, max_examples=120, deadline=None)
@given(machines())
def test_any_machine_reads_back_and_its_paths_hold_together(data):
    topology = load(data)
    assert Topology.from_json(topology.to_json()) == topology
    ends = {link.index: (link.a, link.b) for link in topology.links}
    plan = topology.lanes()
    assert sorted(g for group in topology.link_groups for g in group.gpus) == list(
        range(len(topology.gpus))
    )
    for path in plan.paths:
        # The links form a chain from one memory to the other.
        at = topology.numa_nodes[path.numa_node].id
        goal = topology.gpus[path.gpu].id
        links = path.links if path.direction.name == "H2D" else path.links[::-1]
        slowest = math.inf
        for index, is_a_to_b in topology.native.hops(path):
            link = topology.links[index]
            slowest = min(
                slowest,
                link.a_to_b_bytes_per_s if is_a_to_b else link.b_to_a_bytes_per_s,
            )
        assert path.bandwidth_bytes_per_s == slowest
        visited = []
        for index in links:
            a, b = ends[index]
            assert at in (a, b)
            at = b if at == a else a
            visited.append(at)
        assert at == goal
        through = [node for node in visited[:-1] if node.startswith("gpu")]
        assert through == ([f"gpu{path.relay}"] if path.is_relay else [])
    # Rates never exceed a path or a cap, and pooling never loses.
    rates = topology.native.rates(plan.paths)
    for path, rate in zip(plan.paths, rates, strict=True):
        assert 0 < rate <= path.bandwidth_bytes_per_s * (1 + 1e-9)
    for index, cap in enumerate(plan.caps):
        used = sum(
            rate
            for rate, caps in zip(rates, plan.lane_caps, strict=True)
            for lane_cap in caps
            if lane_cap == index
        )
        assert used <= cap.bandwidth_bytes_per_s * (1 + 1e-6)
    for gpu in topology.gpus:
        for direction in ("h2d", "d2h"):
            direct = topology.native.rates(
                topology.native_paths(gpu.index, direction)[:1]
            )[0]
            assert topology.pooled_bandwidth(gpu.index, direction) >= direct * 0.999
