"""Mixture-of-experts exchange between the devices along a mesh axis."""

from jax_turbobus.moe._combine import combine as combine
from jax_turbobus.moe._dispatch import dispatch as dispatch
from jax_turbobus.moe._matching import exchange_timeout as exchange_timeout
from jax_turbobus.moe._matching import set_exchange_timeout as set_exchange_timeout
from jax_turbobus.moe._state import DispatchState as DispatchState
