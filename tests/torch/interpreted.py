"""Triton's interpreter for one kernel, beside kernels that are compiled as usual."""

from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")


def interpreted(kernel: Any) -> Any:
    """The kernel as Python on CPU tensors; what `TRITON_INTERPRET=1` makes of every kernel."""
    from triton.runtime.interpreter import InterpretedFunction

    return kernel if isinstance(kernel, InterpretedFunction) else InterpretedFunction(kernel.fn)


def compiled(kernel: Any, capability: int, types: dict[str, str], constants: dict[str, Any]) -> Any:
    """The kernel compiled for a GPU that need not be here; `asm` has what came out."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: types.get(name, "i64") for name in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    known = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=known)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32))
