"""Virtual time: the scheduler stepped over a topology, no bytes moved.

    from jax_turbobus import sim
    from jax_turbobus.topology import Topology

    result = sim.simulate(Topology.load("2xh200"), [sim.Transfer(0, 1 << 30)])
    result.makespan_ns

`python -m jax_turbobus sim` prints what the sources report beside what this
gives on the same machines.
"""

from jax_turbobus.sim._policies import POLICIES as POLICIES
from jax_turbobus.sim._policies import Policy as Policy
from jax_turbobus.sim._simulate import simulate as simulate
from jax_turbobus.sim._types import Background as Background
from jax_turbobus.sim._types import BlockRecord as BlockRecord
from jax_turbobus.sim._types import Result as Result
from jax_turbobus.sim._types import Transfer as Transfer
