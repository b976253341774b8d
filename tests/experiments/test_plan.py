"""Reading compiled programs: what runs, how often, what it sends along which mesh axis, what it costs.

Programs are compiled for eight CPU devices, or lie in ``programs`` as the accelerators' compilers print them;
``tests/accelerators`` runs those compilers.
"""

import math
import shutil
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from crossattn.train.program import make_program
from experiments import chips, flops, tiny_checkpoints
from experiments.bench import plans, published
from experiments.errors import SettingsError
from experiments.flops import model_flops, products
from experiments.launch import Refused
from experiments.plan import (
    collectives,
    cost,
    decoding,
    hlo,
    kernels,
    search,
    topologies,
)
from experiments.plan.collectives import Collective, axes_of, replica_groups
from experiments.plan.compiling import unfitting, unread_task
from experiments.settings import train_config
from experiments.tasks import corpus, make_task
from tests.conftest import ROOT
from tests.experiments.test_configs import get_config

MESH = {"data": 2, "fsdp": 4, "tensor": 1, "seq": 1}
ROWS = ((0, 1, 2, 3), (4, 5, 6, 7))
COLUMNS = ((0, 4), (1, 5), (2, 6), (3, 7))


def program(name, *edit):
    """Reads a compiled program as it was printed, with one text replaced by another."""
    text = (ROOT / f"tests/experiments/programs/{name}.hlo").read_text()
    return hlo.Module(text.replace(*edit) if edit else text)


@pytest.mark.parametrize(
    ("printed", "groups", "axes"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ROWS, ("fsdp",)),
        ("[2,4]<=[8]", ROWS, ("fsdp",)),
        ("[4,2]<=[2,4]T(1,0)", COLUMNS, ("data",)),
        ("[1,8]<=[8]", (tuple(range(8)),), ("data", "fsdp")),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", ROWS, ("fsdp",)),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", COLUMNS, ("data",)),
        ("mesh['axis_0'=8] {'axis_0':(1)2}", COLUMNS, ("data",)),
        ("mesh['axis_0'=8] {'axis_0':(2)4}", ROWS, ("fsdp",)),
        ("{}", (tuple(range(8)),), ("data", "fsdp")),
    ],
)
def test_groups_are_read_in_every_form_that_compilers_print(printed, groups, axes):
    found = replica_groups(f", channel_id=1, replica_groups={printed}, dimensions={{0}}", 8)
    assert sorted(found) == sorted(groups)
    assert axes_of(found, MESH) == axes


KNOWN = 'body=%body, backend_config={"known_trip_count":{"n":"7"}}'
PASSED = 64 * 3 / 4  # bytes of an array of 64 that each of four devices passes on


@pytest.mark.parametrize(
    ("name", "edit", "sent"),
    [
        ("loop", (), {("all-reduce", "fsdp"): 5 * 2 * PASSED}),  # its counter is i = 2, 4, .. 10
        ("loop", ("body=%body", KNOWN), {("all-reduce", "fsdp"): 7 * 2 * PASSED}),
        # A TPU spreads a gather over three kernels, each with a copy of it and metadata of several lines.
        ("spread", (), {("all-gather", "fsdp"): PASSED}),
        (
            "started",
            (),
            {
                ("all-gather", "fsdp"): PASSED,
                ("reduce-scatter", "fsdp"): PASSED,
                ("collective-permute", "data"): 16,
                ("all-to-all", "data"): 16 / 2,
            },
        ),
        # An all-reduce of which a device keeps its part.
        ("scattered", (), {("reduce-scatter", "fsdp"): 64 * 16 * 4 * 3 / 4}),
    ],
)
def test_a_device_sends_what_a_ring_sends_as_often_as_loops_run(name, edit, sent):
    assert collectives.totals(collectives.collectives(program(name, *edit), MESH)) == sent


def test_a_loop_without_a_known_end_counts_once_and_is_told():
    module = program("loop", "constant(12)", "parameter(1)")
    assert [run.times for run in module.runs() if run.instruction.opcode == "all-reduce"] == [1]
    assert module.unknown_loops == 1


def test_a_program_of_eight_devices_computes_and_sends_what_its_arithmetic_says():
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), (AxisType.Auto,) * 2)
    rows, whole = (NamedSharding(mesh, spec) for spec in (P(("data", "fsdp")), P(None, "fsdp")))

    def step(x, w):
        return jax.lax.scan(lambda x, layer: (jnp.tanh(x @ layer), None), x, w)[0]

    x = jax.ShapeDtypeStruct((64, 32), "float32", sharding=rows)
    w = jax.ShapeDtypeStruct((6, 32, 32), "float32", sharding=whole)
    compiled = jax.jit(step, out_shardings=rows).lower(x, w).compile()
    module = hlo.Module(compiled.as_text())
    found = collectives.collectives(module, dict(mesh.shape))
    # All six layers' weights are gathered along fsdp, one at a time or all at once.
    assert {(one.kind, *one.axes) for one in found} == {("all-gather", "fsdp")}
    assert sum(one.sent for one in found) == 6 * 32 * 32 * 4 * 3 / 4
    flops = cost.cost(module, chips.CHIPS["h100"]).flops
    assert flops == 6 * 2 * (64 / 8) * 32 * 32


def test_convolutions_count_what_they_multiply():
    """TPUs write products so; the sums are numpy's, one by one."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        size, kernel, stride, holes, spread = rng.integers(1, 5, 5).tolist()
        low, high = rng.integers(0, 3, 2).tolist()
        reach = (kernel - 1) * spread + 1
        out = ((size - 1) * holes + 1 + low + high - reach) // stride + 1
        if out < 1:
            continue
        counted = 0
        for o in range(out):
            for k in range(kernel):
                place = o * stride + k * spread - low
                counted += 0 <= place <= (size - 1) * holes and place % holes == 0
        window = (
            f"size={kernel} stride={stride} pad={low}_{high} lhs_dilate={holes} rhs_dilate={spread}"
        )
        assert cost._pairs(size, kernel, out, window, 0) == counted, window


@pytest.mark.parametrize(
    ("name", "moved"),
    [
        ("fused", 2 * 128 * 128 * 4 + 4),  # a layer read, a layer written, and which
        # One kernel rounds, for another that multiplies.
        ("given_on", 512 * 128 * (4 + 2) + 512 * 128 * 2 + 8 * 128 * 2 + 8 * 512 * 4),
        ("written_in_place", 2 * 8 * 64 * 4 + 8 * 4),  # the update read and written, and where
    ],
)
def test_a_kernel_moves_the_parts_that_it_reads_and_writes(name, moved):
    assert cost.cost(program(name), chips.CHIPS["v5e"]).bytes == moved


def test_a_token_is_a_turn_of_the_loop_that_costs_most_in_all():
    devices = topologies.Topology("v5e:1x1", chips.CHIPS["v5e"], (1, 1), ())
    assert decoding._loop(program("loops"), devices, 64) == "token"


@pytest.mark.parametrize("scope", ["jvp()", "transpose(jvp())/rematted_computation"])
def test_kernels_are_found_by_the_attention_that_they_compute(scope):
    module = program("kernels", "jvp()/cross", f"{scope}/cross")
    assert kernels.attention_kernels(module) == {
        "cross_attention": (kernels.Kernel("cuDNN", False, 1), kernels.Kernel("cuDNN", True, 1))
    }
    # Heads of 64 fill half of a v5e's matrix unit, and a quarter of a v6e's.
    for chip, times in (("h100", 1), ("v5e", 2), ("v6e", 4)):
        spent = cost.cost(module, chips.CHIPS[chip])
        assert spent.flops == (2 + 5) * 2 * 4 * 8 * 256 * 512 * 64
        assert spent.compute == pytest.approx(times * spent.flops / chips.CHIPS[chip].flops)


# A product, the same as a TPU writes it, and four of them, one for each place of a window.
FORMS = {
    "dot": "ROOT %out = bf16[{m},{n}]{{1,0}} dot(%x, %y), lhs_contracting_dims={{1}}, "
    "rhs_contracting_dims={{0}}",
    "convolution": "ROOT %out = bf16[{m},{n}]{{1,0}} convolution(%x, %y), dim_labels=bf_io->bf",
    "batched": "ROOT %out = bf16[{m},4,{n}]{{2,1,0}} convolution(%xs, %ys), dim_labels=b0f_0io->b0f, "
    "window={{size=4 stride=3 pad=0_0 lhs_dilate=4}}",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("chip", "sizes", "times"),
    [
        ("v5e", (1024, 1024, 1024), 1),
        ("v5e", (1024, 64, 1024), 2),  # half of the 128 rows of the unit hold zeros
        ("v6e", (1024, 64, 1024), 4),  # three quarters of 256
        ("v5e", (4, 1024, 1024), 2),  # eight sublanes
        ("v5e", (1024, 1024, 4), 2),  # the other side is held
        ("v5e", (129, 1024, 129), 136 * 256 / 129**2),
        ("h100", (1024, 64, 1024), 1),
    ],
)
def test_small_sides_take_as_long_as_what_the_matrix_unit_pads_them_to(form, chip, sizes, times):
    sizes, chip = dict(zip("mkn", sizes, strict=True)), chips.CHIPS[chip]
    text = (ROOT / "tests/experiments/programs/products.hlo").read_text()
    line = FORMS[form].format(**sizes)
    spent = cost.cost(hlo.Module(text.format(line=line, **sizes)), chip)
    assert spent.flops == 2 * math.prod(sizes.values()) * (4 if form == "batched" else 1)
    assert spent.compute == pytest.approx(times * spent.flops / chip.flops)


def test_products_of_loops_and_branches_are_counted():
    def program(x):
        def body(x, _):
            return x @ x, None

        x = jax.lax.scan(body, x, None, length=5)[0]
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x, x)

    traced = jax.make_jaxpr(program)(jnp.ones((8, 8)))
    assert products(traced) == (5 + 2) * 2 * 8**3


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dimensions", [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")])
def test_a_convolution_has_a_product_for_each_output_and_place_of_its_window(dimensions, groups):
    sizes = dict(N=3, H=8, W=10, C=4), dict(H=3, W=2, I=4 // groups, O=6)
    x, kernel = (
        jnp.ones([own[name] for name in names])
        for own, names in zip(sizes, dimensions, strict=False)
    )

    def program(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, (2, 1), "SAME",
            dimension_numbers=dimensions, feature_group_count=groups,
        )  # fmt: skip

    outputs = 3 * 4 * 10 * 6
    assert products(jax.make_jaxpr(program)(x, kernel)) == 2 * outputs * (3 * 2) * (4 // groups)


@pytest.mark.parametrize("remat", [False, True])
def test_model_flops_are_six_for_a_weight_and_token_and_those_of_attention(remat):
    config = get_config("wmt14_de_en")
    config.data.update(batch_size=4, source_len=32, target_len=32)
    config.model.update(dim=64, num_heads=4, mlp_dim=128, encoder_layers=2, decoder_layers=2)
    config.model.update(scan=True, remat=remat)
    config.tokenizer.vocab_size = 512
    config.loss.update(chunks=2, alignment="none")
    config.mesh.update(data=1, fsdp=1)
    task = unread_task(config)
    program = make_program(task, train_config(config), None)
    tokens, D, F, length = 4 * 32, 64, 128, 32
    encoder, decoder = 4 * D * D + 2 * D * F, 8 * D * D + 2 * D * F
    weights = 2 * (encoder + decoder) + 512 * D
    attention = 3 * 2 * 3 * tokens * 2 * 2 * length * D
    found = model_flops(task, program.target.params, task.batch_shapes(1))
    assert found == 6 * tokens * weights + attention


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("help_cloze:point", "pointing"),
        ("finetune:masked_language_model", "masked_language_model"),
    ],
)
def test_a_text_model_that_writes_nothing_has_no_plan_of_decoding(name, task):
    config = get_config(*f"{name},tiny".split(":"))
    with pytest.raises(SettingsError, match=f"a {task} generates nothing that could be planned"):
        unread_task(config).generation(2)


@pytest.mark.parametrize(
    ("name", "model", "layers", "width"),
    [
        ("copy_task", {}, None, None),
        ("copy_task", dict(scan=True, num_kv_heads=1, head_dim=24, dtype="bfloat16"), None, 24),
        ("finetune:translation", None, 1, 2 * 16),  # a T5 of two heads of 16
        ("finetune:language_model", None, 1, 32),  # a GPT-2 of 32 features
    ],
)
def test_caches_are_those_of_the_model_of_a_checkpoint_too(name, model, layers, width):
    config = get_config(*(f"{name},tiny" if ":" in name else f"{name}:tiny").split(":"))
    config.model.update(model or {})
    task, rows = unread_task(config), 6
    params, generated = jax.eval_shape(task.init, jax.random.key(0)), task.generation(rows)
    read = config.data.source_len if "source_len" in config.data else 0
    layers, width = layers or config.model.decoder_layers, width or config.model.dim
    size = np.dtype(config.model.get("dtype", "float32")).itemsize
    expected = 2 * layers * rows * (generated.length + read) * width * size
    assert decoding._caches(task, params, generated, rows) == expected


def test_every_device_that_jax_names_has_its_figures(monkeypatch):
    assert set(chips.KINDS.values()) == set(chips.CHIPS)
    assert flops.at_peak("a task") is None  # nobody says what a CPU's peak is
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind="NVIDIA H200")] * 4)
    monkeypatch.setattr(flops, "model_flops", lambda *of: 8e12 if of[0] == "a task" else None)
    assert flops.at_peak("a task")("parameters", "batch") == 8e12 / (4 * 989e12)


PLANNED = (
    "copy_task:tiny", "fashion_vit:tiny", "fashion_crossvit:tiny", "emoji_group:both,tiny",
    "emoji_captions:tiny", "emoji_flamingo:tiny", "emoji_llava:tiny", "finetune_whisper:tiny",
    "masked_bytes:tiny",
)  # fmt: skip


@pytest.mark.parametrize("name", PLANNED)
def test_a_batch_has_the_shapes_of_the_data_pipeline_and_none_are_read(name, monkeypatch):
    config = get_config(*name.split(":"))
    made = next(make_task(config).train_iterator(0, 1))
    monkeypatch.setattr(corpus, "open_source", None)  # whoever calls it fails
    planned = unread_task(config).batch_shapes(1)
    shapes = [{n: (x.shape, x.dtype) for n, x in batch.items()} for batch in (made, planned)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("kind", "name"),
    [("whisper", "finetune_whisper:tiny"), ("t5", "finetune:tiny"), ("gpt2", "finetune:language_model,tiny")],
)  # fmt: skip
def test_a_published_config_alone_is_planned_as_with_its_weights(kind, name, tmp_path):
    config = get_config(*name.split(":"))
    tiny_checkpoints.write(kind, tmp_path / "whole")
    (tmp_path / "alone").mkdir()
    shutil.copy(tmp_path / "whole" / "config.json", tmp_path / "alone")
    found = []
    for folder in ("whole", "alone"):
        config.init["from"] = str(tmp_path / folder)
        task = unread_task(config)
        state, batch = make_program(task, train_config(config), None).target, task.batch_shapes(1)
        model_flops(task, state.params, batch)  # its loss can be traced
        found.append((batch, sum(x.size for x in jax.tree.leaves(state.params))))
    assert found[0] == found[1]


class Slice:
    """A topology without a compiler: devices are their places."""

    places = staticmethod(np.asarray)

    def __init__(self, name):
        self.chip, slices, self.sizes = topologies.parse(name)
        slices = () if self.chip.platform == "cuda" else (slices,)
        self.devices = list(np.ndindex(*slices, *self.sizes))


@pytest.mark.parametrize(
    ("name", "group", "links", "cards"),
    [
        ("v5e:4x4", [0, 1, 2, 3], 1, 0),  # a line
        ("v5e:4x4", range(16), 2, 0),  # both axes of a square that does not close
        ("v5e:16x16", range(16), 2, 0),  # a ring
        ("v5p:4x4x4", range(64), 6, 0),
        ("v5p:4x4x4", [0, 1], 1, 0),
        ("v4:4x4x4", range(4), 2, 0),  # a ring
        ("2*v5e:16x16", range(16), 2, 0),  # within a slice
        ("2*v5e:16x16", [0, 256], 0, 1),  # one of each slice
        ("2*v5e:16x16", range(512), 4, 0),  # the cards of all 256 are faster than their links
        ("h100:2x8", range(8), 1, 0),
        ("h100:2x8", [0, 8], 0, 1),  # one of each host
        ("h100:2x8", range(16), 0, 8),
    ],
)
def test_a_group_has_the_links_or_the_network_cards_between_its_members(name, group, links, cards):
    slice_ = Slice(name)
    array = hlo.Shape("s8", (1600,))
    one = Collective("all-gather", ("data",), (tuple(group),), (array,), 1, "")
    speed = collectives.bandwidth(one, slice_, slice_.places(slice_.devices))
    assert speed == links * slice_.chip.link + cards * slice_.chip.network


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("2*h100:1x8 2*v5p:4x4x4", "several slices are planned for v5e, v6e"),
        ("0*v5e:4x4 v5e v5e:4 v5e:4x4x4 v9:2x2 h100:8 v5e:0x4", "expected one of v4, v5e, v5p, v6e"),
    ],
)  # fmt: skip
def test_a_topology_that_cannot_be_planned_is_refused(names, message):
    for name in names.split():
        with pytest.raises(Refused, match=message):
            topologies.parse(name)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "--topology is missing"),
        (("--topology=v5e:2x2", "--search", "--decode"), "--search lays out training"),
        (("--topology=v5e:2x2",), "pip install 'crossattn[plan-tpu]'"),
        (("--topology=h100:1x8",), "pip install 'crossattn[plan-gpu]'"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(refused, monkeypatch, given, message):
    monkeypatch.setattr(topologies.importlib.util, "find_spec", lambda name: None)
    assert message in refused("plan", f"--config={ROOT}/configs/wmt14_de_en.py:tiny", *given)


@pytest.mark.parametrize(
    "name",
    [
        "wmt14_de_en:tiny",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "fashion_perceiver:tiny",
                "emoji_flamingo:tiny",
                "finetune:translation,tiny",
            )
        ),
    ],
)
def test_layouts_of_every_model_divide_rows_heads_and_lengths(monkeypatch, name):
    config = get_config(*name.split(":"))
    config.data.batch_size = 8
    monkeypatch.setattr(search, "make_mesh", lambda config, devices: None)
    found = list(search._Estimates(config, Slice("v5e:4x4")).layouts())
    even = name.startswith(("wmt14", "finetune"))  # lengths that four devices divide
    assert even == any(layout.mesh["seq"] == 4 for layout in found)
    for layout in found:
        sizes = layout.mesh
        assert math.prod(sizes.values()) == 16
        assert 8 % (sizes["data"] * sizes["fsdp"] * layout.accumulate) == 0
        laid = layout.of(config)
        assert dict(laid.mesh) == sizes and laid.model.remat == layout.remat
        assert laid.model.get("num_heads", sizes["tensor"]) % sizes["tensor"] == 0
    same = [one for one in found if one.mesh == found[0].mesh and one.accumulate == 1]
    kept = {one.remat: one.memory for one in same}
    assert kept[True] < kept[False]
    assert all(one.step > 0 for one in found)


@pytest.mark.slow
def test_an_estimate_keeps_what_the_backward_pass_reads(monkeypatch):
    """Rematerialised layers keep their inputs, and the keys and values that a decoder reads."""

    def kept(layers):
        config = get_config("wmt14_de_en", "tiny")
        config.model.update(encoder_layers=layers, decoder_layers=layers, remat=True)
        monkeypatch.setattr(search, "make_mesh", lambda config, devices: None)
        split, whole = search._Estimates(config, Slice("v5e:2x2")).kept[True]
        return config, split + whole

    config, two = kept(2)
    _, four = kept(4)
    tokens = config.data.batch_size * (3 * config.data.source_len + config.data.target_len)
    assert four - two == 2 * tokens * config.model.dim * np.dtype(config.model.dtype).itemsize


def test_the_table_says_what_fits_and_why_not():
    plan = dict(mesh={"data": 2, "fsdp": 8, "tensor": 1}, remat=True, accumulate=2, bound="network")
    plan |= dict(memory={"total": 3 * 2**30, "available": 16 * 2**30}, sent=2**29)
    plan |= dict(step_seconds=0.25, mfu=0.41, mfu_unhidden=0.2)
    row = plans.row("configs/t5_1b.py:v5e@v5e:4x4,config.train.accumulate=2", plan)
    assert row == (
        "| t5_1b:v5e | v5e:4x4 | data=2 x fsdp=8, remat true, accumulate 2 | 3.00 GiB of 16.00 GiB "
        "| 512.00 MiB | network | 250.0 ms | 41 % | 20 % |"
    )
    refusal = plans.row("configs/t5_11b.py@v5e:4x4", {"error": "it is too large"})
    assert refusal.count("|") == row.count("|") and "it is too large" in refusal


# Another test plans a small Whisper.
@pytest.mark.parametrize("name", ["vit_b16", "perceiver_io", "llava_7b"])
def test_published_models_are_planned_without_data_or_weights(name):
    config = published.get_config(name)
    train_config(config)
    batch = unread_task(config).batch_shapes(1)
    assert batch["images" if name == "llava_7b" else "image"].shape[0] == config.data.batch_size


def test_rows_of_the_table_are_chosen_by_expressions(monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(plans, "planned", lambda case, folder: made.append(case) or {"error": "no"})
    command = ["plans", f"--folder={tmp_path}", "--only=t5_1b.*h100", "--only=vit_b16@v5e"]
    monkeypatch.setattr(sys, "argv", command)
    plans.main()
    assert [case.partition(",")[0] for case in made] == [
        "configs/t5_1b.py:h100@h100:1x8",
        "configs/t5_1b.py:h100@h100:8x8",
        "experiments/bench/published.py:vit_b16@v5e:4x4",
    ]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("RESOURCE_EXHAUSTED: Used 19.2G of 15.75G hbm.", "it needs 19.2GiB of the 15.75GiB"),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
            "(256.00G) exceeds available HBM (30.75G).",
            "it needs 256.00GiB of the 30.75GiB",
        ),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem while allocating", "(vmem)"),
        ("RESOURCE_EXHAUSTED: Out of memory", "ran out of its memory"),
    ],
)
def test_what_does_not_fit_is_told_in_figures_where_the_compiler_gave_any(said, told):
    assert told in unfitting(said, "TPU v5e")


def test_members_have_the_flops_of_as_many_runs_and_decoding_plans_one(refused):
    config = get_config("copy_task", "tiny")
    task = unread_task(config)
    params, batch = jax.eval_shape(task.init, jax.random.key(0)), task.batch_shapes(1)
    one = model_flops(task, params, batch)
    stacked = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), (params, dict(batch))
    )
    assert model_flops(task, *stacked, members=3) == 3 * one > 0
    named = f"--config={ROOT}/configs/copy_task.py:tiny"
    flags = ("--config.train.seeds=2", "--topology=v5e:2x2")
    for flag in ("--decode", "--search"):
        assert f"{flag} plans one run" in refused("plan", named, *flags, flag)
