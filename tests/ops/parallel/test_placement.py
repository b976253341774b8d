"""On a mesh each device attends to its own part; the kernel is that of the platform that is lowered for."""

import functools
import json

import jax
import jax.numpy as jnp
import pytest

import crossattn as xa
from tests.compiled_kernel import needs_kernel
from tests.conftest import on_eight_devices
from tests.ops import auto_meshes


@functools.cache
def found():
    return json.loads(on_eight_devices("-m", "tests.ops.auto_meshes").splitlines()[-1])


@pytest.mark.parametrize("case", auto_meshes.CASES)
def test_each_of_eight_devices_attends_to_its_part(case):
    assert found()[case] == ""


def test_a_rule_is_a_tuple_of_mesh_axes():
    with pytest.raises(TypeError, match="rule of 'batch' is 'data'; expected a tuple"):
        with xa.use_rules({"batch": "data"}):
            pass


KERNELS = ("CrossattnForward", "CrossattnBackward", "tpu_custom_call")


def exported(platforms, *arguments):
    """The kernels in a program for other platforms, traced on this one."""

    def loss(x):
        return xa.attend(x, x, x, xa.masks.causal()).astype(jnp.float32).sum()

    unsafe = [jax.export.DisabledSafetyCheck.custom_call(name) for name in KERNELS]
    export = jax.export.export(
        jax.jit(jax.value_and_grad(loss)), platforms=platforms, disabled_checks=unsafe
    )
    text = export(*arguments).mlir_module()
    return {name: text.count(f"@{name}(") for name in KERNELS}


LONG = jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.bfloat16)


def test_a_program_for_a_tpu_has_its_kernels_and_none_of_this_machines():
    # One forward; the queries' gradients, and the keys'. The forward pass is not computed again.
    assert exported(["tpu"], LONG) == dict(zip(KERNELS, (0, 0, 3), strict=True))


@needs_kernel
def test_one_trace_is_lowered_for_each_platform_with_its_own_kernels():
    assert exported(["cpu", "tpu"], LONG) == dict(zip(KERNELS, (1, 1, 3), strict=True))


def test_a_mapped_axis_is_one_more_batch_axis():
    x = jnp.ones((3, 8, 2, 4))
    mapped = jax.make_jaxpr(jax.vmap(lambda x: xa.attend(x, x, x)))(x)
    (attention,) = [e for e in mapped.jaxpr.eqns if e.primitive.name == "attend"]
    assert attention.invars[0].aval.shape == x.shape
