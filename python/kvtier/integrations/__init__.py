"""Inference engines that kvtier plugs into. Importing kvtier imports none of them."""

__all__ = ["VLLM_RELEASES"]

VLLM_RELEASES = ("0.32", "0.33")
"""The releases of vLLM that the plug-in speaks to; here, since the plug-in itself imports vLLM."""
