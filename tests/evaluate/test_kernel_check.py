"""The self-test of the kernels finds the faults it is for."""

from __future__ import annotations

import pytest
import torch

from qkv.evaluate import check_kernels
from qkv.nn.kernels import MathKernel, new_kernel
from qkv.nn.mask import Causal, Mask


class BlindToLayout(MathKernel):
    """Reads queries as if they lay in memory one after the other."""

    def forward(self, q, k, v, mask, scale, dropout=0.0):
        q = torch.as_strided(q, q.shape, torch.empty(q.shape).stride(), q.storage_offset())
        return super().forward(q, k, v, mask, scale, dropout)


class BlindToPermutation(MathKernel):
    """Gets dense values in another order wrong, and those with gaps right."""

    def forward(self, q, k, v, mask, scale, dropout=0.0):
        wrong = q.stride(-1) == 1 and not q.is_contiguous()
        return super().forward(q.flip(1) if wrong else q, k, v, mask, scale, dropout)


class BlindToGaps(MathKernel):
    """Gets values with gaps between them wrong."""

    def forward(self, q, k, v, mask, scale, dropout=0.0):
        return super().forward(q.flip(1) if q.stride(-1) != 1 else q, k, v, mask, scale, dropout)


class TopLeft(MathKernel):
    """Aligns the causal mask with the first key, as fused kernels' flags do."""

    def forward(self, q, k, v, mask, scale, dropout=0.0):
        if isinstance(mask.rule, Causal):
            mask = Mask(mask.rule, torch.arange(q.shape[2]), mask.num_keys, aligned=False)
        return super().forward(q, k, v, mask, scale, dropout)


class EmptyRowsAreNaN(MathKernel):
    def forward(self, q, k, v, mask, scale, dropout=0.0):
        out = super().forward(q, k, v, mask, scale, dropout)
        return out.masked_fill(~mask.tensor().any(-1, keepdim=True), float("nan"))


class PaddingLeaks(MathKernel):
    """Multiplies what stands in padding by zero, NaN included."""

    def forward(self, q, k, v, mask, scale, dropout=0.0):
        return super().forward(q, k, v, Mask(None, mask.q_slots, mask.num_keys, aligned=True), scale, dropout)


class WrongGroups(MathKernel):
    """Gives query heads their key/value heads in turn instead of in groups."""

    def forward(self, q, k, v, mask, scale, dropout=0.0):
        repeats = q.shape[1] // k.shape[1]
        return super().forward(q, k.repeat(1, repeats, 1, 1), v.repeat(1, repeats, 1, 1), mask, scale, dropout)


class WrongGradient(MathKernel):
    def forward(self, q, k, v, mask, scale, dropout=0.0):
        out = super().forward(q, k, v, mask, scale, dropout)
        return out + 0.01 * (out - out.detach())


class Unsupported(MathKernel):
    def forward(self, q, k, v, mask, scale, dropout=0.0):
        if k.shape[1] != q.shape[1]:
            raise RuntimeError("no kernel for grouped queries")
        return super().forward(q, k, v, mask, scale, dropout)


FAULTS = {
    BlindToLayout: ("permuted", "strided"),
    BlindToPermutation: ("permuted",),
    BlindToGaps: ("strided",),
    TopLeft: ("causal, behind a cache", "one query"),
    EmptyRowsAreNaN: ("empty rows",),
    PaddingLeaks: ("padding", "empty rows", "one key/value head"),
    WrongGroups: ("grouped queries",),
    WrongGradient: ("",),
    Unsupported: ("grouped queries", "one key/value head"),
}


@pytest.fixture(scope="module")
def found():
    kernels = {kind.__name__: kind() for kind in FAULTS}
    checks = check_kernels("cpu", kernels=kernels, dtypes=(torch.float32,))
    return {check.kernel: check for check in checks}


def test_every_kernel_is_right_on_this_cpu_in_float32_and_bfloat16() -> None:
    checks = check_kernels("cpu", kernels={name: new_kernel(name) for name in ("math", "tiled", "sdpa")})
    assert [(check.kernel, check.dtype) for check in checks] == [
        (kernel, dtype) for dtype in ("fp32", "bf16") for kernel in ("math", "tiled", "sdpa")
    ]
    assert all(check.gradients for check in checks)
    assert all(check.ok for check in checks), checks
    assert all(check.error > 0 for check in checks)


def test_of_flex_which_has_no_gradients_on_a_cpu_the_outputs_are_checked() -> None:
    (check,) = check_kernels("cpu", kernels={"flex": new_kernel("flex")}, dtypes=(torch.float32,))
    assert check.ok
    assert check.error > 0
    assert not check.gradients


@pytest.mark.parametrize("kind", FAULTS, ids=lambda kind: kind.__name__)
def test_a_faulty_kernel_is_found_and_its_case_named(found, kind) -> None:
    check = found[kind.__name__]
    assert not check.ok
    assert any(name in check.case for name in FAULTS[kind])


def test_the_check_draws_nothing_from_the_global_generator() -> None:
    before = torch.get_rng_state()
    check_kernels("cpu", kernels={"math": MathKernel()}, dtypes=(torch.float32,))
    assert torch.equal(before, torch.get_rng_state())
