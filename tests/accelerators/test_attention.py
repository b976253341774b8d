"""What ``attend`` lowers to on a TPU, its compiler takes: masks, biases, dtypes, head sizes, lengths."""

from tests.accelerators.test_four import compile_for_v5e


def test_every_kind_of_attention_compiles_for_v5e_as_fused_kernels():
    compile_for_v5e("tests.accelerators.attention")
