"""What accelerators can do, by their makers' figures: one row a chip.

The one thing to know: these are the figures of data sheets, dense (no sparsity), which no program
reaches whole; what is estimated from them is a bound.

Sources:
  TPU v5e, v5p, v6e: https://cloud.google.com/tpu/docs/v5e, /v5p and /v6e (memory, bf16 FLOP/s, memory
    bandwidth, links); one-way bandwidth of one link: J. Austin et al. 2025, "How to Scale Your Model",
    https://jax-ml.github.io/scaling-book/tpus. Rings close where an axis of a slice is as long as the pod
    (v5e, v6e: 16) or a multiple of 4 (v5p).
  H100, H200 SXM: https://www.nvidia.com/en-us/data-center/h100/ and /h200/ (memory, memory bandwidth,
    tensor-core FLOP/s at half the figures with sparsity, NVLink 900 GB/s both ways); eight 400 Gb/s
    network cards a node: https://docs.nvidia.com/dgx/dgxh100-user-guide/.
"""

import os
from dataclasses import dataclass

GiB, GB, T = 2**30, 10**9, 10**12


@dataclass(frozen=True)
class Chip:
    """One accelerator.

    Attributes:
      name: as its maker calls it.
      platform: what JAX lowers for, "tpu" or "cuda".
      memory: bytes of HBM; available: of them, to a program.
      flops: bfloat16 FLOP/s; float32_flops: of a product of float32 at JAX's default precision, which
        is one pass in bfloat16 on a TPU and TF32 on NVIDIA's.
      bandwidth: bytes/s of HBM.
      link: bytes/s, one way, of one link to a neighbour (TPU) or of a device into NVLink.
      network: bytes/s, one way, of a GPU's card out of its host; slices of TPUs are one network of links.
      axes: of the torus (TPU); 0 where devices of a host reach each other through a switch.
      ring: an axis of a slice whose length is a multiple of this closes to a ring.
    """

    name: str
    platform: str
    memory: int
    available: int
    flops: float
    float32_flops: float
    bandwidth: float
    link: float
    network: float = 0.0
    axes: int = 0
    ring: int = 0


def _tpu(
    name: str,
    memory: float,
    available: float,
    flops: float,
    bandwidth: float,
    link: float,
    **torus: int,
) -> Chip:
    return Chip(name, "tpu", int(memory), int(available), flops, flops, bandwidth, link, **torus)


def _gpu(name: str, memory: int, bandwidth: float) -> Chip:
    # JAX takes three quarters of a GPU's memory, unless told otherwise.
    share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75))
    speed = (989 * T, 494 * T, bandwidth, 450 * GB, 50 * GB)
    return Chip(name, "cuda", memory, int(share * memory), *speed)


CHIPS = {
    "v5e": _tpu("TPU v5e", 16 * GiB, 15.75 * GiB, 197 * T, 819 * GB, 45 * GB, axes=2, ring=16),
    "v5p": _tpu("TPU v5p", 95 * GiB, 95.0 * GiB, 459 * T, 2765 * GB, 90 * GB, axes=3, ring=4),
    "v6e": _tpu("TPU v6e", 32 * GiB, 31.25 * GiB, 918 * T, 1640 * GB, 90 * GB, axes=2, ring=16),
    "h100": _gpu("H100 SXM", 80 * GiB, 3350 * GB),
    "h200": _gpu("H200 SXM", 141 * GB, 4800 * GB),
}
