"""Where figures were taken: the machine and the versions of what ran."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kvtier._kvtier import __version__, build_profile

__all__ = ["machine", "versions"]


def machine() -> dict[str, Any]:
    """CPU, cores, memory, kernel, load, and the GPU if torch is loaded and sees one."""
    torch = sys.modules.get("torch")
    gpu = None
    if torch is not None and torch.cuda.is_available():
        gpu = str(torch.cuda.get_device_name())
    return {
        "cpu": _first_line("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "load": round(os.getloadavg()[0], 2),
        "gpu": gpu,
    }


def versions() -> dict[str, str]:
    """Of kvtier, its build, Python, numpy, torch with its CUDA, and vLLM; the last if loaded."""
    found = {
        "kvtier": __version__,
        "build": build_profile,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(torch.__version__)
        found["cuda"] = str(torch.version.cuda)
    vllm = sys.modules.get("vllm")
    if vllm is not None:
        found["vllm"] = str(vllm.__version__)
    return found


def _first_line(path: str, name: str) -> str | None:
    """What stands behind the first `name : ` of a file of the kernel."""
    try:
        text = Path(path).read_text()
    except OSError:
        return None
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None
