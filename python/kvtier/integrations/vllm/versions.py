"""Which versions of vLLM this plug-in speaks to, and all that differs between them.

vLLM calls its offloading interface experimental, so a version that nobody ran is refused when the
plug-in is imported, before an engine trusts it with a prompt.
"""

from __future__ import annotations

import vllm

from kvtier.errors import ConfigError
from kvtier.integrations import VLLM_RELEASES

__all__ = ["ANNOUNCES_RESET_FLUSHED", "SUPPORTED", "running_version"]

SUPPORTED = VLLM_RELEASES


def running_version(version: str = vllm.__version__) -> str:
    """The `major.minor` of a version of vLLM, by default of the installed one.

    Raises `ConfigError` with the versions that are supported for another one.
    """
    release = ".".join(version.split(".")[:2])
    if release not in SUPPORTED:
        raise ConfigError(
            f"vLLM {version} is not supported: this kvtier works with vLLM "
            f"{', '.join(SUPPORTED)}; install one of these, or a newer kvtier"
        )
    return release


ANNOUNCES_RESET_FLUSHED = running_version() != "0.32"
"""Whether vLLM tells the manager when the transfers from before a reset have ended
(`on_reset_flushed`). 0.32 does not; the manager then counts steps."""
