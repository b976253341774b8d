"""Topologies of devices that are not here, by the accelerators' own compilers.

A topology is CHIP:SIZES, a slice (``v5e:4x4``, ``v5p:4x4x4``), several slices joined by a slower network
(``2*v5e:16x16``), or hosts and the devices of each (``h100:2x8``).
"""

import importlib.util
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from experiments.chips import CHIPS, Chip
from experiments.launch import Refused

_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several plans at once: none of them holds a TPU
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "2",  # of XLA, errors alone
}
_INSTALL = {"tpu": "crossattn[plan-tpu]", "cuda": "crossattn[plan-gpu]"}
_PACKAGES = {"tpu": ("libtpu",), "cuda": ("jax_cuda12_plugin", "jax_cuda13_plugin")}
_HOST = 4  # chips of a host in a slice of several hosts


@dataclass(frozen=True)
class Topology:
    """Devices to compile for, in order.

    Attributes:
      sizes: of a slice, or (hosts, devices of each).
    """

    name: str
    chip: Chip
    sizes: tuple[int, ...]
    devices: tuple[Any, ...]

    def places(self, devices: Sequence[Any]) -> np.ndarray:
        """Returns the slice and the coordinates in it of each device, or its host and number there."""
        if self.chip.platform == "tpu":
            axes = len(self.sizes)
            return np.asarray([(getattr(x, "slice_index", 0), *x.coords[:axes]) for x in devices])
        numbers = {device.id: number for number, device in enumerate(self.devices)}
        return np.asarray([divmod(numbers[device.id], self.sizes[1]) for device in devices])


def prepare() -> None:
    """Sets this process up to compile for devices that it lacks, before JAX looks for its own.

    A TPU's compiler would otherwise ask the network whether it runs on one. Arrays stay on the CPU.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")  # whose variable JAX has read already


def topology(name: str) -> Topology:
    """Returns a topology with its devices.

    Raises:
      Refused: there is no such chip or size, or no compiler for it here.
    """
    chip, slices, sizes = parse(name)
    if all(importlib.util.find_spec(package) is None for package in _PACKAGES[chip.platform]):
        raise Refused(
            f"the compiler for {chip.name} is not installed: pip install '{_INSTALL[chip.platform]}'"
        )
    prepare()
    try:
        if chip.platform == "tpu":
            devices = _tpu(name.rpartition("*")[2], slices, sizes)
        else:
            devices = _gpu(name.partition(":")[0], sizes)
    except Exception as error:  # the plugins raise errors of many kinds
        reason = " ".join(str(error).split())
        raise Refused(f"there is no topology {name}: {reason}") from error
    return Topology(name, chip, sizes, tuple(devices))


def parse(name: str) -> tuple[Chip, int, tuple[int, ...]]:
    """Parses a name into the chip, the number of slices and the sizes; needs no compiler.

    Raises:
      Refused: the name is not CHIP:SIZES, or N*CHIP:SIZES, with a known chip.
    """
    match = re.fullmatch(r"(?:([1-9]\d*)\*)?(\w+):([1-9]\d*(?:x[1-9]\d*)*)", name)
    chip = CHIPS.get(match.group(2)) if match else None
    sizes = tuple(int(size) for size in match.group(3).split("x")) if match else ()
    if match is None or chip is None or len(sizes) != (chip.axes or 2):
        raise Refused(
            f"got topology {name!r}; expected one of {', '.join(CHIPS)} with sizes, such as v5e:4x4 or "
            "v5p:4x4x4 (a slice), 2*v5e:16x16 (two slices) or h100:2x8 (hosts x devices)."
        )
    slices = int(match.group(1) or 1)
    if slices > 1 and not (chip.axes and chip.network):
        known = ", ".join(name for name, other in CHIPS.items() if other.axes and other.network)
        raise Refused(f"got topology {name!r}; several slices are planned for {known}.")
    return chip, slices, sizes


def _tpu(name: str, slices: int, sizes: tuple[int, ...]) -> Sequence[Any]:
    options: dict[str, Any] = {} if slices == 1 else {"num_slices": slices}
    if name.startswith("v4:"):
        options["chip_config_name"] = "megacore"  # both cores of a chip are one device, as in JAX
    if math.prod(sizes) < _HOST:  # the whole slice is in one host
        options["chips_per_host_bounds"] = [*sizes, *[1] * (3 - len(sizes))]
    return topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices


def _gpu(chip: str, sizes: tuple[int, ...]) -> Sequence[Any]:
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name=chip,
        topology=f"1x{sizes[0]}x{sizes[1]}",
        target_config=_target(chip),
    ).devices


# Compute capability, multiprocessors, GHz, L2 in MiB, shared memory of a multiprocessor in KiB.
_GPUS = {
    "a100": ("major: 8", 108, 1.41, 40, 164),
    "h100": ("major: 9 feature_extension: ACCELERATED_FEATURES", 132, 1.98, 50, 228),
    "h200": ("major: 9 feature_extension: ACCELERATED_FEATURES", 132, 1.98, 50, 228),
    "b200": ("major: 10 feature_extension: ACCELERATED_FEATURES", 148, 1.965, 126, 228),
}


def _target(chip: str) -> str:
    """Returns a ``GpuTargetConfigProto`` as text, by which XLA's compiler tunes.

    Source: NVIDIA, "A100" and "H100 Tensor Core GPU Architecture", the Blackwell tuning guide, and the CUDA
    C++ programming guide, compute capabilities 8.0, 9.0 and 10.0.
    """
    memory, bandwidth = CHIPS[chip].memory, int(CHIPS[chip].bandwidth)
    capability, multiprocessors, clock, cache, shared = _GPUS[chip]
    return f"""
      platform_name: "CUDA"
      device_description_str: "NVIDIA {chip.upper()}"
      dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
      gpu_device_info {{
        name: "NVIDIA {chip.upper()}"
        device_vendor: "NVIDIA Corporation"
        cuda_compute_capability {{ {capability} }}
        device_memory_size: {memory}
        memory_bandwidth: {bandwidth}
        l2_cache_size: {cache * 2**20}
        clock_rate_ghz: {clock}
        core_count: {multiprocessors}
        fpus_per_core: 128
        threads_per_warp: 32
        threads_per_block_limit: 1024
        threads_per_core_limit: 2048
        thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
        block_dim_limit_x: {2**31 - 1} block_dim_limit_y: {2**16 - 1} block_dim_limit_z: {2**16 - 1}
        registers_per_core_limit: {2**16}
        registers_per_block_limit: {2**16}
        shared_memory_per_core: {shared * 2**10}
        shared_memory_per_block: {48 * 2**10}
        shared_memory_per_block_optin: {(shared - 1) * 2**10}
        device_address_bits: 64
        driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
        dnn_version: "9.10.0"
      }}
    """
