"""Mixture-of-experts exchange between the devices along a mesh axis."""

from jax_turbobus._export import export_checks as export_checks
from jax_turbobus.moe._choice import choose_schedule as choose_schedule
from jax_turbobus.moe._combine import combine as combine
from jax_turbobus.moe._dispatch import dispatch as dispatch
from jax_turbobus.moe._expert_parallel import expert_parallel as expert_parallel
from jax_turbobus.moe._matching import exchange_timeout as exchange_timeout
from jax_turbobus.moe._matching import set_exchange_timeout as set_exchange_timeout
from jax_turbobus.moe._placement import Placement as Placement
from jax_turbobus.moe._placement_plan import plan_placement as plan_placement
from jax_turbobus.moe._ragged import ragged_all_to_all as ragged_all_to_all
from jax_turbobus.moe._state import DispatchState as DispatchState
from jax_turbobus.moe._stats import ExchangeStats as ExchangeStats
from jax_turbobus.moe._stats import exchange_stats as exchange_stats
from jax_turbobus.moe._stats import reset_exchange_stats as reset_exchange_stats
from jax_turbobus.moe._volume import (
    required_recv_capacity as required_recv_capacity,
)
from jax_turbobus.moe._volume import volume as volume
