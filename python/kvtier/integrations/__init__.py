"""Inference engines that kvtier plugs into. Importing kvtier imports none of them."""
