"""The bytes that a token reads and that decoding holds on one accelerator, against its weights and caches.

The accelerators' own compilers compile it, on any CPU machine (``make accelerators``); each program takes
about half a minute.
"""

import functools

import pytest

from tests.accelerators.test_sixteen import made_plan, topologies

LAYERS, SOURCE = 2, 128
TOPOLOGIES = topologies(["v5e:1x1", "h100:1x1"])
OPTIONS = (
    "--config.model.encoder_layers=1",
    f"--config.model.decoder_layers={LAYERS}",
    "--config.model.num_heads=4",  # of 128, which fill the lanes of a TPU
    "--config.evaluate.decoding.batch_size=256",
    "--config.tokenizer.vocab_size=8000",  # logits are read and written too
    f"--config.data.source_len={SOURCE}",
)


@functools.cache
def planned(topology, scan):
    config = "--config=configs/wmt14_de_en.py"
    return made_plan(topology, config, "--decode", *OPTIONS, f"--config.model.scan={scan}")


@pytest.mark.parametrize("scan", [False, True], ids=["looped", "scanned"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_token_reads_weights_in_their_compute_type_and_caches_once(topology, scan):
    plan = planned(topology, scan)
    weights = plan["memory"]["parameters"] / 2  # bfloat16
    assert plan["caches"] > 5 * weights
    assert plan["read"] <= 1.3 * (weights + plan["caches"])


@pytest.mark.parametrize("scan", [False, True], ids=["looped", "scanned"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_temporaries_beside_weights_and_caches_are_less_than_one_cache(topology, scan):
    plan = planned(topology, scan)
    weights = plan["memory"]["parameters"] / 2
    share = plan["length"] / (plan["length"] + SOURCE)  # the rest are keys and values of the source
    one = share * plan["caches"] / LAYERS
    assert plan["memory"]["temporaries"] <= weights + plan["caches"] + one
