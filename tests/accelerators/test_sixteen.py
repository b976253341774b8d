"""The bytes that a step holds and sends on sixteen accelerators, against the arithmetic of its mesh.

The accelerators' own compilers compile it, on any CPU machine (``make accelerators``); each program takes
10 to 90 seconds. ``W`` are the bytes of all weights in bfloat16, and as many of all gradients; ``A`` those
of one [rows, 256, 1024] activation of a device that splits the rows over ``data`` and ``fsdp``.
"""

import functools
import importlib.util
import json
import math
import subprocess
import sys
from itertools import permutations

import pytest

from tests.conftest import ROOT, as_users_have_it

CONFIG = "--config=tests/accelerators/config.py"
ROWS, LENGTH, DIM, VOCAB = 256, 256, 1024, 32000
LAYERS = 2  # of the encoder, and of the decoder
PLACES = ("encoder_attention", "decoder_attention", "cross_attention")
COMPILERS = {
    "v5p": ("libtpu", "plan-tpu"),
    "v5e": ("libtpu", "plan-tpu"),
    "h100": ("jax_cuda12_plugin", "plan-gpu"),
}
# One process has all of a compiler: plans are kept in it, and two processes of libtpu disturb one another.
ONE_PROCESS = {name: pytest.mark.xdist_group(package) for name, (package, _) in COMPILERS.items()}
MESHES = ("data=16", "fsdp=16", "data=4,fsdp=4", "fsdp=4,tensor=4", "data=4,seq=4")


def figures(weights, mesh):
    """Computes what a device should send in a step: (collective, axis) -> bytes, ``weights`` in bfloat16."""
    sizes = dict(data=1, fsdp=1, tensor=1, seq=1) | sizes_of(mesh)
    data, fsdp, tensor, seq = sizes.values()
    W, A = weights, ROWS // (data * fsdp) * LENGTH // seq * DIM * 2
    own = W / tensor  # weights and gradients of a row of devices along data, fsdp and seq
    found = {}
    # Gradients of what a device keeps are summed over those that keep the same, once.
    found["all-reduce", "data"] = 2 * own / fsdp * ring(data)
    # Each layer's weights are gathered for the forward and for the backward pass; gradients are scattered.
    found["all-gather", "fsdp"] = 2 * own * ring(fsdp)
    found["reduce-scatter", "fsdp"] = own * ring(fsdp)
    # What a sublayer adds is summed over its heads or hidden units, and so is the gradient of what it
    # reads: an encoder layer has 2 sublayers, a decoder layer 3 and the gradient of the memory; so are
    # two embeddings, and the gradient of what the output layer reads.
    sums = LAYERS * (2 * 2 + 2 * 3 + 1) + 2 + 1
    found["all-reduce", "tensor"] = sums * 2 * A * ring(tensor)
    # Every attention reads the keys and values of all, once for each pass, and scatters their gradients.
    found["all-gather", "seq"] = 3 * LAYERS * 2 * 2 * A * seq * ring(seq)
    found["reduce-scatter", "seq"] = 3 * LAYERS * 2 * A * seq * ring(seq)
    # The sequence's parts have each their gradients of all weights.
    found["all-reduce", "seq"] = 2 * own / fsdp * ring(seq)
    return {which: sent for which, sent in found.items() if sent}


def ring(n):
    """Returns the share of an array that each of n devices passes on, for all to have it."""
    return (n - 1) / n


def sizes_of(mesh):
    return {axis: int(size) for axis, size in (part.split("=") for part in mesh.split(","))}


@functools.cache
def planned(topology, mesh, *options):
    """Makes the plan of the config's step on a mesh such as "data=4,fsdp=4"."""
    sizes = [f"--config.mesh.{size}" for size in ("data=1", *mesh.split(","))]
    return made_plan(topology, CONFIG, *sizes, *options)


def made_plan(topology, *options, code=0):
    """Runs the launcher; returns its JSON, or the last line of a refusal for another exit code."""
    package, extra = COMPILERS[topology.partition(":")[0]]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"no compiler for {topology}: pip install 'crossattn[{extra}]'")
    command = [sys.executable, "-m", "experiments.plan", "--json", f"--topology={topology}"]
    command += options
    run = subprocess.run(command, cwd=ROOT, env=as_users_have_it(), capture_output=True, text=True)
    assert run.returncode == code, run.stderr[-2000:]
    return run.stderr.splitlines()[-1] if code else json.loads(run.stdout)


def topologies(shapes):
    """Parameters of each, such as "v5e:4x4"."""
    return [pytest.param(shape, marks=ONE_PROCESS[shape.partition(":")[0]]) for shape in shapes]


@pytest.fixture(params=topologies(["v5e:4x4", "h100:2x8"]))
def topology(request):
    return request.param


@pytest.fixture(params=MESHES)
def mesh(request):
    return request.param


def test_no_more_than_twice_the_arithmetic_of_the_mesh_is_sent(topology, mesh):
    plan = planned(topology, mesh)
    expected = figures(2 * plan["parameters"], mesh)
    assert plan["sent"] <= 2 * sum(expected.values()), told(plan)
    for axis in sizes_of(mesh):
        sent = sum(c["sent"] for c in plan["collectives"] if axis in c["axes"])
        assert sent <= 2 * sum(v for (_, own), v in expected.items() if own == axis), told(plan)


def test_temporaries_are_near_those_of_splitting_the_rows_alone(topology, mesh):
    if (topology, mesh) == ("v5e:4x4", "data=4,seq=4"):
        # The keys and values of four times the rows are gathered, their gradients made, and both laid out
        # anew, in lanes of 128 for heads of 64.
        pytest.xfail("it holds 1.85 GiB where data=16 holds 1.32")
    least = planned(topology, "data=16")["memory"]["temporaries"]
    plan = planned(topology, mesh)
    assert plan["memory"]["temporaries"] <= 1.3 * least


def test_every_attention_runs_a_fused_kernel_forward_and_backward(topology, mesh):
    kernels = planned(topology, mesh)["kernels"]
    assert set(kernels) == set(PLACES)
    for place in PLACES:
        assert {kernel["backward"] for kernel in kernels[place]} == {False, True}, place


def test_no_activation_crosses_fsdp(topology, mesh):
    plan = planned(topology, mesh)
    crossing = [
        (c["kind"], array["sizes"], c["scope"])
        for c in plan["collectives"]
        for array in c["arrays"]
        if "fsdp" in c["axes"] and is_activation(array["sizes"])
    ]
    assert not crossing, f"{crossing[:3]} {told(plan)}"


@pytest.mark.parametrize("layout", ["--config.model.scan=True", "--config.model.scan=False"])
@pytest.mark.parametrize("parts", [2, 4])
def test_accumulating_sends_gradients_once_a_step(topology, layout, parts):
    once = planned(topology, "data=16", layout)
    often = planned(topology, "data=16", layout, f"--config.train.accumulate={parts}")
    assert often["sent"] <= 1.1 * once["sent"], told(often)


def test_accumulating_sends_gradients_along_data_once_where_weights_are_split(topology):
    options = "--config.model.scan=True", "--config.train.accumulate=4"
    plan = planned(topology, "data=4,fsdp=4", *options)
    expected = figures(2 * plan["parameters"], "data=4,fsdp=4")
    sent = sum(c["sent"] for c in plan["collectives"] if "data" in c["axes"])
    assert sent <= 1.1 * expected["all-reduce", "data"], told(plan)


def test_a_loss_in_chunks_sends_no_more_than_one_in_one_piece(topology, mesh):
    once, chunked = planned(topology, mesh), planned(topology, mesh, "--config.loss.chunks=4")
    assert chunked["sent"] <= 1.05 * once["sent"], told(chunked)


def test_a_loss_in_chunks_gathers_its_table_once_and_sums_its_gradient_once(topology):
    plan = planned(topology, "fsdp=16", "--config.loss.chunks=4")
    table = [
        c
        for c in plan["collectives"]
        if any(math.prod(a["sizes"]) in (VOCAB * DIM, VOCAB * DIM // 16) for a in c["arrays"])
    ]
    assert {c["times"] for c in table} == {1}, told(plan)


def test_the_gradient_of_a_table_is_sent_once_for_look_ups_and_loss(topology):
    plan = planned(topology, "fsdp=16", "--config.loss.chunks=4")
    sums = [c for c in plan["collectives"] if c["kind"] in ("all-reduce", "reduce-scatter")]
    sizes = [math.prod(a["sizes"]) for c in sums for a in c["arrays"]]
    # libtpu makes an all-reduce of what is scattered over all chips of a 4x4 slice.
    whole = VOCAB * DIM if topology == "v5e:4x4" else VOCAB * DIM // 16
    assert [size for size in sizes if size >= VOCAB * DIM // 16] == [whole], told(plan)


def test_scanned_layers_are_gathered_one_at_a_time(topology):
    plan = planned(topology, "fsdp=16", "--config.model.scan=True")
    layer = 4 * DIM * DIM + 2 * DIM * 4 * DIM
    expected = figures(2 * plan["parameters"], "fsdp=16")
    assert plan["sent"] <= 2 * sum(expected.values()), told(plan)
    for c in plan["collectives"]:
        if c["kind"] == "all-gather" and "fsdp" in c["axes"]:
            largest = max(math.prod(array["sizes"]) for array in c["arrays"])
            assert largest <= max(VOCAB * DIM, 2 * layer), told(plan)


def test_scanned_layers_hold_no_more_where_weights_are_split(topology):
    whole, split = (
        planned(topology, m, "--config.model.scan=True") for m in ("data=16", "fsdp=16")
    )
    assert split["memory"]["temporaries"] <= 1.3 * whole["memory"]["temporaries"]


@ONE_PROCESS["v5p"]
def test_a_mesh_that_does_not_lie_on_the_torus_is_refused():
    assert made_plan("v5p:4x4x4", CONFIG, "--config.mesh.fsdp=8", code=2).endswith(
        "a mesh of data 8 x fsdp 8 x tensor 1 x seq 1 does not lie on a torus of 4 x 4 x 4 chips: each"
        " size has to be a product of some of its sides"
    )


# What weights are cut from, biggest axes and all; one more axis of layers where they are scanned.
_WEIGHTS = ((VOCAB, DIM), (DIM, 4 * DIM), (DIM, 16, 64))


def is_activation(sizes):
    """Returns whether an array is large, and no part of a weight, which has no axes [rows, length, ..]."""
    sizes = [size for size in sizes if size > 1]
    if math.prod(sizes) < LENGTH * DIM or len(sizes) < 2:
        return False  # statistics, ids; and the flat arrays that GPUs send many weights in
    if sizes[0] == LAYERS and len(sizes) > 2:
        sizes = sizes[1:]
    if len(sizes) == 2:  # TPUs join a weight's part and its bias, padded, such as [256 + 8, 4096]
        return math.prod(sizes) > VOCAB * DIM
    return not any(is_part(sizes, weight) for weight in _WEIGHTS)


def is_part(sizes, weight):
    return len(sizes) <= len(weight) and any(
        all(whole % size == 0 for size, whole in zip(sizes, order, strict=False))
        for order in permutations(weight)
    )


def told(plan):
    """Formats the largest collectives, for a failure's message."""
    rows = sorted(plan["collectives"], key=lambda c: -c["sent"])[:12]
    return "\n" + "\n".join(
        f"{c['sent'] / 2**20:9.1f} MiB {c['kind']} over {'+'.join(c['axes'])} x{c['times']} "
        f"{[a['sizes'] for a in c['arrays']][:4]} {c['scope'][-80:]}"
        for c in rows
    )
