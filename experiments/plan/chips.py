"""What accelerators can do, by their makers' figures: one row a chip.

The one thing to know: these are the figures of data sheets, dense (no sparsity), which no program
reaches whole; what is estimated from them is a bound.

Sources:
  TPU v5e, v5p, v6e: https://cloud.google.com/tpu/docs/v5e, /v5p and /v6e (memory, bf16 FLOP/s, memory
    bandwidth, links); one-way bandwidth of one link: J. Austin et al. 2025, "How to Scale Your Model",
    https://jax-ml.github.io/scaling-book/tpus. Rings close where an axis of a slice is as long as the pod
    (v5e, v6e: 16) or a multiple of 4 (v5p). Between slices: the data-centre network of a host, 25 GB/s.
  H100, H200 SXM: https://www.nvidia.com/en-us/data-center/h100/ and /h200/ (memory, memory bandwidth,
    tensor-core FLOP/s at half the figures with sparsity, NVLink 900 GB/s both ways); eight 400 Gb/s
    network cards a node: https://docs.nvidia.com/dgx/dgxh100-user-guide/.
"""

from dataclasses import dataclass

GiB, GB, T = 2**30, 10**9, 10**12


@dataclass(frozen=True)
class Chip:
    """One accelerator.

    Attributes:
      name: as its maker calls it.
      platform: what JAX lowers for, "tpu" or "cuda".
      memory: bytes of HBM.
      flops: bfloat16 FLOP/s; float32_flops: of a product of float32 (TPUs: three passes in bfloat16;
        NVIDIA: TF32 is not used for them by XLA unless asked, so plain float32).
      bandwidth: bytes/s of HBM.
      link: bytes/s, one way, of one link to a neighbour (TPU) or of a device into NVLink.
      network: bytes/s, one way, that a device has out of its host or slice.
      axes: of the torus (TPU); 0 where devices of a host reach each other through a switch.
      ring: the length of a slice's axis from which on it closes to a ring.
    """

    name: str
    platform: str
    memory: int
    flops: float
    float32_flops: float
    bandwidth: float
    link: float
    network: float
    axes: int = 0
    ring: int = 0


CHIPS = {
    "v5e": Chip(
        "TPU v5e", "tpu", 16 * GiB, 197 * T, 197 * T / 3, 819 * GB, 45 * GB, 3.1 * GB, 2, 16
    ),
    "v5p": Chip(
        "TPU v5p", "tpu", 95 * GiB, 459 * T, 459 * T / 3, 2765 * GB, 90 * GB, 6.2 * GB, 3, 4
    ),
    "v6e": Chip(
        "TPU v6e", "tpu", 32 * GiB, 918 * T, 918 * T / 3, 1640 * GB, 90 * GB, 6.2 * GB, 2, 16
    ),
    "h100": Chip("H100 SXM", "cuda", 80 * GiB, 989 * T, 67 * T, 3350 * GB, 450 * GB, 50 * GB),
    "h200": Chip("H200 SXM", "cuda", 141 * GB, 989 * T, 67 * T, 4800 * GB, 450 * GB, 50 * GB),
}
