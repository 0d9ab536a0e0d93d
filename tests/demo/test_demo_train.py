"""The model, the optimizer on the host, and both backends against each other."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_turbobus.demo import backends, model, text
from jax_turbobus.demo.options import Options, choose_devices
from jax_turbobus.demo.train import AXIS, TrainConfig, Trainer

SMALL = model.ModelConfig(
    num_layers=2, hidden=32, num_heads=2, expert_hidden=48, context=32
)
ROOMY = dataclasses.replace(SMALL, capacity_factor=4.0)  # drops nothing
ONE_LAYER = dataclasses.replace(SMALL, num_layers=1)
SHORT = TrainConfig(num_steps=12, batch=8, eval_every=6, eval_batches=2)


@functools.cache
def corpus():
    return text.load_standard_library(SMALL.context)


def start(backend, config=SMALL, train_config=SHORT, num_devices=4):
    if isinstance(backend, str):
        backend = backends.get(backend)
    devices = jax.devices()[:num_devices]
    return Trainer(config, train_config, backend, corpus(), devices)


@functools.cache
def train(backend, config=SMALL, train_config=SHORT):
    trainer = start(backend, config, train_config)
    return trainer, list(trainer.run())


def dense(expert_fn, tokens, expert_ids, weights, *, num_experts, **_):
    """Every expert on every token, on one device: nothing to exchange."""
    rows = jnp.broadcast_to(tokens, (num_experts, *tokens.shape))
    out = expert_fn(rows)[expert_ids, jnp.arange(len(tokens))[:, None]]
    return jnp.einsum("tk,tkh->th", weights, out), jnp.int32(0)


def start_dense(config=SMALL, train_config=SHORT):
    plain = dataclasses.replace(backends.get("reference"), exchange=dense)
    return start(plain, config, train_config, num_devices=1)


@functools.cache
def dense_losses():
    return [step.loss for step in start_dense(ROOMY).run()]


@pytest.mark.parametrize("backend", sorted(backends.BACKENDS))
def test_losses_equal_those_of_dense_experts_on_one_device(backend):
    trainer, steps = train(backend, ROOMY)
    assert all(step.dropped == 0 for step in steps)
    np.testing.assert_allclose([s.loss for s in steps], dense_losses(), rtol=1e-5)
    assert trainer.held_out_loss() == steps[-1].held_out


def test_both_backends_learn_the_same_with_rows_over_capacity():
    tight = dataclasses.replace(SMALL, capacity_factor=1.0)
    _, ours = train("turbobus", tight)
    _, theirs = train("reference", tight)
    assert sum(step.dropped for step in ours) > 0
    for a, b in zip(ours, theirs, strict=True):
        # Where two experts come out nearly equal, rounding decides between them.
        assert np.mean(a.expert_ids == b.expert_ids) > 0.99
        assert abs(a.dropped - b.dropped) <= 4
    np.testing.assert_allclose(
        [s.loss for s in ours], [s.loss for s in theirs], rtol=1e-4
    )
    assert ours[-1].held_out == pytest.approx(theirs[-1].held_out, rel=1e-4)


def test_seed_decides_everything():
    first = [step.loss for step in start("turbobus", ONE_LAYER).run()]
    again = [step.loss for step in start("turbobus", ONE_LAYER).run()]
    assert first == again
    other = start("turbobus", ONE_LAYER, dataclasses.replace(SHORT, seed=1))
    assert not np.array_equal(other.params["embed"], start("turbobus").params["embed"])


@pytest.mark.parametrize("backend", sorted(backends.BACKENDS))
def test_experts_are_spread_and_moments_stay_on_the_host(backend):
    trainer, _ = train(backend, ROOMY)
    experts = trainer.params["layers"][0]["experts"]["up"]
    assert {s.data.shape[0] for s in experts.addressable_shards} == {2}
    moments = [leaf for leaf in jax.tree.leaves(trainer.opt_state) if leaf.ndim]
    assert len(moments) == 2 * len(jax.tree.leaves(trainer.params))
    for leaf in moments:
        assert leaf.sharding.memory_kind == "pinned_host"
        assert leaf.addressable_shards[0].data.size == leaf.size // 4


def test_untrained_model_knows_nothing():
    trainer = start("reference")
    assert trainer.held_out_loss() == pytest.approx(np.log(256), abs=1e-4)


def test_attention_is_causal():
    trainer, _ = train("reference", ROOMY)
    specs = model.param_specs(trainer.params, AXIS)

    def logits(params, inputs):
        exchange = backends.get("reference").exchange
        return model.apply(params, inputs, ROOMY, exchange, AXIS)[0]

    run = jax.jit(
        jax.shard_map(
            logits,
            mesh=trainer.mesh,
            in_specs=(specs, jax.P(AXIS)),
            out_specs=jax.P(AXIS),
        )
    )
    inputs = np.random.default_rng(0).integers(0, 256, (4, 32)).astype(np.int32)
    changed = inputs.copy()
    changed[:, 20:] = 7
    before, after = run(trainer.params, inputs), run(trainer.params, changed)
    np.testing.assert_allclose(before[:, :20], after[:, :20], atol=1e-5)
    assert not np.allclose(before[:, 20:], after[:, 20:], atol=1e-2)


def test_optimizer_is_adam():
    # One step by hand, everything on one device.
    config = dataclasses.replace(SHORT, num_steps=1, warmup_steps=0)
    one = start_dense(ONE_LAYER, config)
    before = jax.device_get(one.params)
    rng = np.random.default_rng(config.seed + 2)
    batch = text.windows(corpus().train, rng, config.batch, SMALL.context)
    by_hand = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(config.learning_rate, b2=0.99)
    )

    @jax.jit
    def expected(params):
        grads = jax.grad(lambda p: one._loss(p, batch)[0])(params)
        updates, _ = by_hand.update(grads, by_hand.init(params))
        return optax.apply_updates(params, updates)

    after = jax.device_get(expected(before))
    list(one.run())
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
        jax.device_get(one.params),
        after,
    )


@pytest.mark.parametrize(
    ("asked", "available", "expected"), [(None, 8, 8), (None, 3, 2), (2, 8, 2)]
)
def test_device_count_divides_experts(asked, available, expected):
    options = Options(num_devices=asked)
    assert len(choose_devices(options, jax.devices()[:available])) == expected


@pytest.mark.parametrize(("asked", "available"), [(3, 8), (16, 8), (4, 2)])
def test_device_count_that_cannot_be_is_refused(asked, available):
    options = Options(num_devices=asked)
    with pytest.raises(ValueError, match=rf"--devices: expected one of .* got {asked}"):
        choose_devices(options, jax.devices()[:available])
