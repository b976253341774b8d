"""A recurrent encoder-decoder as a translator: it is aligned if it has attention, and scored in any case."""

import jax
import numpy as np
import pytest

from configs import rnn_translation
from crossattn.data.sources import phrases
from experiments.errors import SettingsError
from experiments.settings import check
from experiments.tasks import make_task


@pytest.mark.quick(1)
@pytest.mark.parametrize("variant", ["luong", "none"])
def test_a_report_has_alignments_where_there_is_attention(variant, monkeypatch):
    monkeypatch.setattr(phrases, "NUM_PAIRS", 540)
    task = make_task(rnn_translation.get_config(f"{variant},tiny"))
    params = task.init(jax.random.key(0))
    found = task.report(params, "test", limit=3)
    assert found["sentences"] == 3 and np.isfinite(found["test_loss"])
    if variant == "none":
        assert (found["aer"], found["alignment_recipe"]) == (None, "no attention")
        return
    assert 0 <= found["aer"] <= 100
    (read,) = task.translator(params).attention([("the cat", "le chat")])
    assert read.weights.shape == (1, 1, len(read.target_tokens), len(read.source_tokens))
    np.testing.assert_allclose(read.weights.sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize(
    ("variant", "key", "value", "said"),
    [
        ("none", "alignment", "diagonal", "a loss of attention, but model.attention is none"),
        ("none", "alignment_coverage", 1.0, "a loss of attention, but model.attention is none"),
        ("luong", "alignment_layer", 1, "alignment_layer is 1; the decoder has 1 layers"),
        ("luong", "alignment", "latent", "a lexicon beside a 'transformer', not beside a 'rnn_enc"),
    ],
)
def test_a_loss_of_attention_that_it_has_not_is_refused(variant, key, value, said):
    config = rnn_translation.get_config(f"{variant},tiny")
    with config.ignore_type():
        config.loss[key] = value
    with pytest.raises(SettingsError, match=said):
        check(config)
