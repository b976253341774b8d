"""explain tells what attend would run, in attend's own words, and computes nothing."""

import functools
import warnings

import jax
import jax.numpy as jnp
import pytest

import crossattn as xa
from crossattn import __main__ as program
from crossattn.ops import backends, platforms

BIG = jax.ShapeDtypeStruct((64, 65536, 8, 64), jnp.float32)  # 8 GB an array, 10 TB of logits
SMALL = jnp.ones((1, 4, 2, 8))
OPTIONS = [
    {},
    {"mask": xa.masks.causal()},
    {"bias": jnp.zeros((1, 2, 4, 4))},
    {"softcap": 3.0, "scale": 0.5},
    {"return_weights": True},
    {"return_lse": True},
    {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)},
]


@pytest.fixture
def as_gpu(monkeypatch):
    """A machine that says it has a GPU, where only the reference takes a call."""

    def refuse(*arguments, **options):
        raise NotImplementedError("the kernel does not know how")

    reference = backends.get("reference")
    fast = type("fast", (), {"attend": staticmethod(refuse)})
    gpu = platforms.Target("gpu", True)
    monkeypatch.setattr(platforms, "of_arrays", lambda arrays: gpu)
    monkeypatch.setattr(platforms, "platform", lambda: "gpu")
    monkeypatch.setattr(backends, "_FEW", 0)  # few queries would be the reference's by choice
    monkeypatch.setattr(backends, "ordered", lambda platform: ("fast", "reference"))
    monkeypatch.setattr(backends, "get", {"fast": fast, "reference": reference}.__getitem__)
    backends._warn_once.cache_clear()
    yield fast
    backends._warn_once.cache_clear()


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_the_backend_explained_is_the_one_that_runs(options, monkeypatch):
    ran = []

    def noted(name, attend, *arguments, **keywords):
        found = attend(*arguments, **keywords)
        ran.append(name)
        return found

    explained = xa.explain(SMALL, SMALL, SMALL, **options)
    for name in backends.names():
        module = backends.get(name)
        monkeypatch.setattr(module, "attend", functools.partial(noted, name, module.attend))
    xa.attend(SMALL, SMALL, SMALL, **options)
    assert ran[-1] == explained.backend
    assert not {explained.backend, *explained.refused, *explained.unsuited} & {*explained.untried}


def test_shapes_will_do_and_a_refusal_has_its_reason():
    explained = xa.explain(BIG, BIG, BIG, xa.masks.causal())
    assert explained.backend in backends.names()
    assert explained.platform == jax.default_backend()
    explained = xa.explain(BIG, BIG, BIG, backend="jax_nn", softcap=2.0)
    assert explained.backend is None
    assert "softcap" in explained.refused["jax_nn"]
    assert "runs      nothing: every backend asked refused" in str(explained)


@pytest.mark.parametrize("queries, keys", [(4, 0), (0, 4), (0, 0)])
def test_no_keys_and_no_queries_need_no_backend(queries, keys):
    q, k = SMALL[:, :queries], SMALL[:, :keys]
    explained = xa.explain(q, k, k)
    assert explained.backend is None and not explained.refused
    assert "there is no query, or no key to read" in str(explained)
    assert xa.attend(q, k, k, backend="chunked").shape == q.shape


def test_it_prints_the_call_the_choice_and_the_reasons():
    mask = xa.masks.causal() & (xa.masks.prefix(3) | xa.masks.window(2))
    said = str(xa.explain(SMALL, SMALL, SMALL, mask, return_weights=True, scale=0.5))
    first, second, *_ = said.splitlines()
    assert first == (
        f"attend on {jax.default_backend()}: q float32[1, 4, 2, 8], k float32[1, 4, 2, 8], "
        "v float32[1, 4, 2, 8], mask Band & (Lengths | Band), return_weights, scale=0.5"
    )
    assert second == "  runs      reference"


def test_an_accelerator_that_runs_plain_jax_says_so_once_a_reason(as_gpu):
    with pytest.warns(
        UserWarning, match="'reference' on this gpu.*fast: the kernel does not know how"
    ):
        xa.attend(SMALL, SMALL, SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        xa.attend(SMALL, SMALL, SMALL, xa.masks.causal())

    def refuse(*arguments, **options):
        raise NotImplementedError("another reason")

    as_gpu.attend = staticmethod(refuse)
    with pytest.warns(UserWarning, match="another reason"):
        xa.attend(SMALL, SMALL, SMALL)


def test_the_fallback_that_skips_no_kernel_says_so_too(monkeypatch):
    """On a GPU float32 operands, which cuDNN refuses, go through the chunks."""
    monkeypatch.setattr(backends, "ordered", lambda platform: ("jax_nn", "chunked", "reference"))
    backends._warn_once.cache_clear()
    long = jax.ShapeDtypeStruct((1, 8192, 8, 64), jnp.float32)
    with pytest.warns(UserWarning, match="'chunked' on this gpu.*jax_nn: cuDNN .* not float32"):
        jax.export.export(jax.jit(xa.attend), platforms=["cuda"])(long, long, long)


def test_the_reference_as_the_better_choice_or_by_name_is_no_reason_to_warn(as_gpu):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        xa.attend(SMALL, SMALL, SMALL, backend="reference")
        xa.explain(SMALL, SMALL, SMALL)
        as_gpu.unsuited = staticmethod(lambda q, k: "too small")
        xa.attend(SMALL, SMALL, SMALL)


def test_doctor_names_versions_platform_kernel_and_a_backend_for_each_call(capsys):
    assert program.main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert f"crossattn {xa.__version__}; Python" in said
    assert f"jax {jax.__version__}" in said
    assert f"platform {jax.default_backend()}: {jax.device_count()} x" in said
    assert "compiled kernel: " in said
    for name in program._calls():
        assert any(line.startswith(f"{name}  ") for line in said.splitlines()), name
    for who, why in xa.explain(SMALL, SMALL, SMALL, return_weights=True).refused.items():
        assert f"{who}: {why}" in said


def test_whoever_reads_the_report_may_stop(monkeypatch):
    def closed(*values, **options):
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", closed)
    monkeypatch.setattr("os.dup2", lambda *files: None)
    assert program.main(["doctor"]) == 141


def test_an_unknown_command_prints_the_usage(capsys):
    assert program.main(["docter"]) == 2
    assert "python -m crossattn doctor" in capsys.readouterr().err
    assert program.main(["--help"]) == 0
