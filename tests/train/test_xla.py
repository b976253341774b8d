"""Flags of XLA that are kept with a run."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crossattn.train import xla
from crossattn.train.state import init_state
from crossattn.train.step import make_train_step


def test_flags_are_names_and_values_a_name_alone_is_on():
    text = "xla_a=true, --xla_b=False,xla_c,xla_d=65536,xla_dump_to=runs/x=1"
    found = {"xla_a": True, "xla_b": False, "xla_c": True, "xla_d": "65536"}
    assert xla.flags(text) == found | {"xla_dump_to": "runs/x=1"}
    assert xla.flags(None) is None and xla.flags("") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *[(text, "expected NAME=VALUE") for text in ("=1", "xla_a=", "xla_a=1,,xla_b")],
        ("xla_there_is_none=1", "xla_flags: No such compile option: 'xla_there_is_none'"),
        ("xla_cpu_enable_fast_math=perhaps", "fast_math, 'perhaps' is not a valid bool"),
    ],
)
def test_flags_that_the_compiler_does_not_know_are_refused(text, said):
    with pytest.raises(ValueError, match=said):
        xla.refuse_unknown(text)
    xla.refuse_unknown(None)
    xla.refuse_unknown("xla_cpu_enable_fast_math=false")


def test_the_step_is_compiled_with_them(tmp_path):
    def loss(params, batch, key):
        value = jnp.sum(params["w"] * batch)
        return value, {"loss": value, "weight": jnp.float32(1)}

    optimizer = optax.sgd(0.1)
    options = xla.flags(f"xla_dump_to={tmp_path}")
    step = make_train_step(loss, optimizer, compiler_options=options)
    step(init_state({"w": jnp.ones(3)}, optimizer), jnp.ones(3))
    assert list(tmp_path.glob("*jit_step*after_optimizations.txt"))


def test_parameters_drawn_by_a_quickly_compiled_program_are_the_same(monkeypatch):
    def draw(key):
        return jax.random.truncated_normal(key, -2, 2, (33, 65))

    quick = jax.jit(draw, compiler_options=xla.flags(xla.quickly()))(jax.random.key(0))
    np.testing.assert_allclose(quick, jax.jit(draw)(jax.random.key(0)), rtol=1e-6)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert xla.quickly() is None
