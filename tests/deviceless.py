"""Compiles programs for CUDA on a machine without a GPU."""

import functools
import importlib
import importlib.util
import pathlib
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_turbobus import _ffi

HOST = jax.memory.Space.Host
TARGET = pathlib.Path(__file__).with_name("h200.txtpb")

# Compile-only devices list no memories, so no argument's type says that it lies on
# the host. This says so, and `_set_kinds` tells XLA.
as_host_p = Primitive("as_host")
as_host_p.def_abstract_eval(lambda x: x.update(memory_space=HOST))
mlir.register_lowering(as_host_p, lambda context, x: [x])


def _set_kinds(attributes, is_host):
    kinds = []
    for n, attribute in enumerate(attributes):
        named = {entry.name: entry.attr for entry in attribute}
        kind = "pinned_host" if n in is_host else "device"
        kinds.append(
            ir.DictAttr.get(named | {"mhlo.memory_kind": ir.StringAttr.get(kind)})
        )
    return ir.ArrayAttr.get(kinds)


class Hlo(str):
    """An optimized module. Each call in it is a line."""

    def calls(self, target):
        return [
            line.strip()
            for line in self.splitlines()
            if f'custom_call_target="{target}"' in line
        ]

    def counts(self):
        """How often each of our targets is called, and host memory allocated."""
        found = re.findall(r'custom_call_target="(turbobus_\w+|AllocateBuffer)"', self)
        return {name: found.count(name) for name in sorted(set(found))}

    def host_copies(self):
        """Copies to or within host memory that XLA has put in."""
        return [
            line.strip()
            for line in self.splitlines()
            if re.search(r"S\(5\)\S* (copy|copy-start)\(", line)
            or re.search(r" copy-start\(.*S\(5\)", line)
        ]


def _cuda_topology(num_devices):
    return topologies.get_topology_desc(
        platform="cuda",
        target_config=TARGET.read_text(),
        topology=f"1x1x{num_devices}",
    )


def _load_compiler():
    """Registers JAX's CUDA plugin, which gives up where there is no CUDA otherwise."""
    try:
        _cuda_topology(1)
    except NotImplementedError:
        plugin = importlib.import_module("jax_plugins.xla_cuda13")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
            plugin.initialize()
        # What JAX does for plugins that it loads itself; custom_partitioning is in it.
        from jax._src import xla_bridge  # noqa: TID251

        c_api = xla_bridge._backend_factories["cuda"].c_api
        for callback in xla_bridge._plugin_callbacks:
            callback(c_api=c_api)


@pytest.fixture(scope="session")
def cuda():
    """`compile(f, *arguments, num_devices=1)`, and `host` and `device` arguments."""
    has_plugins = importlib.util.find_spec("jax_plugins") is not None
    if not has_plugins or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        pytest.skip("the CUDA plugin of JAX (jax-cuda13-plugin) is not installed")
    _load_compiler()
    topology = {n: _cuda_topology(n) for n in (1, 2)}
    targets = _ffi.core().ffi_targets()
    halves = dict.fromkeys(_ffi.CUDA_ONLY, targets["turbobus_moe_dispatch"])
    for name, stages in (targets | halves).items():
        # Never run: XLA only asks whether there is a handler.
        jax.ffi.register_ffi_target(name, stages, platform="CUDA")

    def mesh_of(num_devices, axis_type=AxisType.Auto):
        return jax.sharding.Mesh(
            np.array(topology[num_devices].devices), ("x",), axis_types=(axis_type,)
        )

    def compiled(f, *arguments, num_devices=1, axis_type=AxisType.Auto, **options):
        mesh = mesh_of(num_devices, axis_type)
        host = {n for n, argument in enumerate(arguments) if argument.on_host}
        shapes = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, a.spec))
            for a in arguments
        ]

        def program(*xs):
            return f(*(as_host_p.bind(x) if n in host else x for n, x in enumerate(xs)))

        traced = jax.jit(program, keep_unused=True, **options).trace(*shapes)
        lowered = traced.lower()
        results = traced.jaxpr.out_avals
        host_results = {
            n for n, aval in enumerate(results) if aval.memory_space == HOST
        }
        module = lowered._lowering._hlo
        with module.context:
            main = next(
                op
                for op in module.body.operations
                if "sym_name" in op.attributes
                and ir.StringAttr(op.attributes["sym_name"]).value == "main"
            )
            main.arg_attrs = _set_kinds(main.arg_attrs, host)
            main.result_attrs = _set_kinds(main.result_attrs, host_results)
        return Hlo(lowered.compile().as_text())

    def argument(on_host, shape, dtype=np.float32, spec=None):
        return SimpleNamespace(
            on_host=on_host, shape=shape, dtype=np.dtype(dtype), spec=spec or P()
        )

    return SimpleNamespace(
        compile=compiled,
        mesh_of=mesh_of,
        device=functools.partial(argument, False),
        host=functools.partial(argument, True),
    )
