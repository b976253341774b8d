"""Summaries by a copy head: the loss of the mixture, and what it lacks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import man_pages
from crossattn.train.losses import cross_entropy
from experiments.errors import SettingsError
from experiments.settings import check
from experiments.tasks import make_task


@pytest.mark.slow
def test_the_loss_of_a_task_is_the_cross_entropy_of_the_mixture():
    task = make_task(man_pages.get_config("copy,tiny"))
    task.config.loss.chunks = 4
    params = task.init(jax.random.key(0))
    batch = jax.tree.map(jnp.asarray, next(iter(task.eval_batches("validation", None))))
    loss, sums = jax.jit(lambda p: task.loss(p, batch, None))(params)
    model = task.bind(params)
    hidden, _ = jax.jit(lambda: task.read_source(model, batch, None))()
    log_p = model.logits(hidden)
    wanted, expected = cross_entropy(log_p, batch["target_out"], batch["target_segment_ids"] > 0)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    for name in ("loss", "nll", "correct", "weight"):
        np.testing.assert_allclose(sums[name], expected[name], rtol=1e-5)


@pytest.mark.parametrize("key", ["label_smoothing", "z_loss"])
def test_a_mixture_has_no_smoothed_loss(key):
    config = man_pages.get_config("copy,tiny")
    config.loss.update({key: 0.1})
    with pytest.raises(SettingsError, match=f"loss.{key} is 0.1; a 'pointer_generator' mixes two"):
        check(config)
    config.model.name = "transformer"
    check(config)


def test_both_variants_differ_in_the_head_alone():
    copy, plain = (man_pages.get_config(name).to_dict() for name in man_pages.COPIES)
    assert copy["model"].pop("name") == "pointer_generator" and plain["model"].pop("name")
    assert copy == plain
