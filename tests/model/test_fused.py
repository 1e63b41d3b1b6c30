"""Fused kernels that make one pass over a GPU's memory: with Triton's interpreter, and compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from aladdin_mpi.flat import fused
from benchmarks.gpu_check import rows
from benchmarks.gpu_check.device import TEST, VARIABLE
from benchmarks.gpu_check.rows import PASS
from tests.launch import ROOT

triton = pytest.importorskip("triton")

F32, BF16, I8, I32, NUMBER = "*fp32", "*bf16", "*i8", "i32", "fp32"
SIGNATURES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "quantise": ([F32, F32, F32, I8, I32, I32, NUMBER, NUMBER], {"WIDTH": 256, "ROWS": 4}),
    "add_dequantised": ([F32, F32, I8, I32, NUMBER], {"WIDTH": 256, "ROWS": 4}),
    "quantise, bf16": (
        [F32, BF16, F32, I8, I32, I32, NUMBER, NUMBER],
        {"WIDTH": 256, "ROWS": 4},
    ),
    "add_dequantised, bf16": ([BF16, F32, I8, I32, NUMBER], {"WIDTH": 256, "ROWS": 4}),
    "momentum_step": (
        [F32, F32, F32, I32, NUMBER, NUMBER],
        {"NESTEROV": True, "BLOCK": 1024},
    ),
    "track_advance": ([F32, F32, F32, I32, *[NUMBER] * 3], {"BLOCK": 1024}),
    "track_advance, bf16": ([F32, BF16, F32, I32, *[NUMBER] * 3], {"BLOCK": 1024}),
    "track_model, bf16": (
        [F32, F32, BF16, F32, I32, NUMBER],
        {"HAS_MOVED": True, "BLOCK": 1024},
    ),
    "track_model": (
        [F32, F32, F32, F32, I32, NUMBER],
        {"HAS_MOVED": True, "BLOCK": 1024},
    ),
}


def test_fused_kernels_match_torch_operations() -> None:
    """With Triton's interpreter, which a process must request before it imports Triton."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", VARIABLE: TEST, "PYTHONPATH": str(ROOT)}
    completed = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_check.kernels"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    result = [row for row in map(rows.parse, completed.stdout.splitlines()) if row is not None]
    assert completed.returncode == 0 and len(result) == 11, completed.stderr[-3000:]
    assert [row for row in result if row.status != PASS] == []


@pytest.mark.parametrize("name", SIGNATURES)
def test_fused_kernels_compile_without_contracting_products_and_sums(name: str) -> None:
    """Compiled for a GPU that need not exist on this machine."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from aladdin_mpi.flat import kernels

    kernel: Any = getattr(kernels, name.partition(",")[0])
    types, settings = SIGNATURES[name]
    signature = dict(zip(kernel.arg_names, [*types, *["constexpr"] * len(settings)], strict=True))
    constants = {(kernel.arg_names.index(key),): value for key, value in settings.items()}
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False}
    )
    assert "fma" not in compiled.asm["ptx"]


def test_fused_kernels_are_not_used_for_cpu_vectors() -> None:
    assert not fused.is_usable(torch.zeros(8))
