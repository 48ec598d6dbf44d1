"""What this machine has: processor, memory, GPUs. Reads, never changes; no torch."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from pathlib import Path

from outrider.kernels.cpu.availability import usable_cpus

SIMD_FLAGS = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)
"""The instruction sets a kernel could be written for, in /proc/cpuinfo's words (x86, then ARM)."""


@dataclass(frozen=True, slots=True)
class Processor:
    model: str
    num_cores: int  # that this process may keep busy, which in a container can be fewer than there are
    simd: tuple[str, ...]


def read_processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> Processor:
    """The processor as Linux describes it; on other systems only what Python knows."""
    fields: dict[str, str] = {}
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip().lower(), value.strip())  # the first core speaks for all
    flags = set((fields.get("flags") or fields.get("features") or "").split())
    return Processor(
        model=fields.get("model name") or platform.processor() or platform.machine(),
        num_cores=usable_cpus(),
        simd=tuple(flag for flag in SIMD_FLAGS if flag in flags),
    )


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes that can be taken without swapping, or None where the system does not say."""
    if not meminfo.exists():
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def gpu_driver() -> str | None:
    """The maker whose GPU driver is loaded, whether or not torch can use it."""
    if Path("/proc/driver/nvidia/version").exists():
        return "NVIDIA"
    if Path("/dev/kfd").exists():
        return "AMD"
    return None
