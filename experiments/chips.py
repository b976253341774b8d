"""The figures of accelerators by their makers' data sheets, dense (no sparsity): one row a chip.

No program reaches them whole, so that an estimate from them is a bound.

Sources:
  TPU v4, v5e, v5p, v6e: https://cloud.google.com/tpu/docs/v4, /v5e, /v5p and /v6e (memory, bf16 FLOP/s,
    memory bandwidth, links; network between slices of v5e and v6e: that of a pod over its 256 chips);
    one-way bandwidth of one link, sizes of matrix units: J. Austin et al. 2025, "How to Scale Your Model",
    https://jax-ml.github.io/scaling-book/tpus. Rings close where an axis of a slice is as long as the pod
    (v5e, v6e: 16) or a multiple of 4 (v4, v5p).
  A100, H100, H200 SXM: https://www.nvidia.com/en-us/data-center/a100/, /h100/ and /h200/ (memory, memory
    bandwidth, tensor-core FLOP/s at half the figures with sparsity, NVLink 600 and 900 GB/s both ways);
    eight 200 and 400 Gb/s network cards a node: https://docs.nvidia.com/dgx/dgxa100-user-guide/,
    /dgxh100-user-guide/.
  B200: https://www.nvidia.com/en-us/data-center/hgx/ and /dgx-b200/ (180 GB and 8 TB/s a GPU, FLOP/s at
    half the figures with sparsity, NVLink 1.8 TB/s both ways, 400 Gb/s cards).
"""

import os
from dataclasses import dataclass
from typing import Any

GiB, GB, T = 2**30, 10**9, 10**12


@dataclass(frozen=True)
class Chip:
    """An accelerator.

    Attributes:
      name: its maker's name.
      platform: JAX's platform, "tpu" or "cuda".
      memory: bytes of HBM; available: those that a program may use.
      flops: bfloat16 FLOP/s; float32_flops: of a product of float32 at JAX's default precision, which
        is one pass in bfloat16 on a TPU and TF32 on NVIDIA's.
      bandwidth: bytes/s of HBM.
      link: bytes/s, one way, of one link to a neighbour (TPU) or of a device into NVLink.
      network: bytes/s, one way, out of a GPU's host or a TPU's slice, for each of its devices; 0: unknown.
      axes: axes of the torus (TPU); 0 for devices of a host with a switch.
      ring: an axis of a slice whose length is a multiple of this closes to a ring.
      unit: sizes that its matrix unit pads a product [rows, inner] x [inner, columns] to, as (rows, inner,
        columns): 8 sublanes and the sides of the systolic array; of NVIDIA's tensor cores, one warp group's
        instruction.
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
    unit: tuple[int, int, int] = (64, 16, 8)


def _tpu(
    name: str, memory: float, available: float, flops: float, *speed: Any, **torus: Any
) -> Chip:
    held = int(memory * GiB), int(available * GiB)
    return Chip(name, "tpu", *held, flops, flops, *speed, **torus)


def _gpu(name: str, memory: int, *speed: Any) -> Chip:
    # JAX takes three quarters of a GPU's memory, unless told otherwise.
    share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75))
    return Chip(name, "cuda", memory, int(share * memory), *speed)


_CUBE = dict(axes=3, ring=4, unit=(8, 128, 128))
_SQUARE = dict(axes=2, ring=16, unit=(8, 128, 128))
_SQUARE_256 = dict(axes=2, ring=16, unit=(8, 256, 256))

# TPUs: memory and available GiB. All: FLOP/s in bfloat16 and float32, bytes/s of HBM, link and network.
CHIPS = {
    "v4": _tpu("TPU v4", 32, 30.75, 275 * T, 1200 * GB, 45 * GB, **_CUBE),
    "v5e": _tpu("TPU v5e", 16, 15.75, 197 * T, 819 * GB, 45 * GB, 3.125 * GB, **_SQUARE),
    "v5p": _tpu("TPU v5p", 95, 95, 459 * T, 2765 * GB, 90 * GB, **_CUBE),
    "v6e": _tpu("TPU v6e", 32, 31.25, 918 * T, 1640 * GB, 90 * GB, 12.5 * GB, **_SQUARE_256),
    "a100": _gpu("A100 SXM", 80 * GiB, 312 * T, 156 * T, 2039 * GB, 300 * GB, 25 * GB),
    "h100": _gpu("H100 SXM", 80 * GiB, 989 * T, 494 * T, 3350 * GB, 450 * GB, 50 * GB),
    "h200": _gpu("H200 SXM", 141 * GB, 989 * T, 494 * T, 4800 * GB, 450 * GB, 50 * GB),
    "b200": _gpu("B200", 180 * GB, 2250 * T, 1100 * T, 8000 * GB, 900 * GB, 50 * GB),
}

# Chips by JAX's name of the device.
KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "NVIDIA A100-SXM4-40GB": "a100",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
}
