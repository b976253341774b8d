"""On eight devices, in a process of their own: gradients of loops are one device's, and are sent once."""

import json

import pytest

from tests.conftest import on_eight_devices


@pytest.fixture(scope="module")
def faults():
    return json.loads(on_eight_devices("-m", "tests.train.sent_once"))


@pytest.mark.parametrize("case", ["loss on all axes", "loss along seq"])
def test_a_loss_in_chunks_sends_its_table_and_its_gradient_once(faults, case):
    assert not faults[case], faults[case]


def test_microbatches_of_scanned_layers_send_their_gradients_once(faults):
    assert not faults["accumulated"], faults["accumulated"]


def test_repeats_of_the_same_layers_send_their_gradients_once(faults):
    assert not faults["repeated"], faults["repeated"]
