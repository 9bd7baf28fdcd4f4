"""From images, sound and other features to vectors of the model's width.

A row's padding is read as zeros, so that nothing that stands there (another token, NaN) reaches a real vector.

Shapes: B batch, C channels, H and W height and width in pixels, N patches, R registers, F frames, S mels, T vectors, M
model width; of features, W is their width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.config.parts import FeatureInputConfig, LogMelInputConfig, PatchInputConfig
from qkv.nn.build import Dims, build


class FeatureInput(nn.Linear):
    """Vectors of any origin, projected to the model's width: [B, T, W] -> [B, T, M]."""

    def __init__(self, config: FeatureInputConfig, dims: Dims) -> None:
        super().__init__(config.width, dims.d_model)

    def forward(self, x_BTW: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        return super().forward(zero_padding(x_BTW, lengths_B))


class PatchInput(nn.Module):
    """ViT's (Dosovitskiy et al. 2020, arXiv 2010.11929): each patch of an image through one matrix, row by row, after a
    learned class token and registers. [B, C, H, W] -> [B, 1 + R + N, M]."""

    def __init__(self, config: PatchInputConfig, dims: Dims) -> None:
        super().__init__()
        side = config.patch_size
        self.convolution = nn.Conv2d(config.channels, dims.d_model, side, stride=side, bias=config.bias)
        self.class_token = nn.Parameter(torch.empty(dims.d_model)) if config.class_token else None
        count = config.num_registers
        self.registers = nn.Parameter(torch.empty(count, dims.d_model)) if count else None

    def forward(self, images_BCHW: Tensor, lengths_B: None = None) -> Tensor:
        x_BNM = self.convolution(images_BCHW).flatten(2).transpose(1, 2)
        learned = [token for token in (self.class_token, self.registers) if token is not None]
        return torch.cat((*(_repeated(token, x_BNM) for token in learned), x_BNM), dim=1)


def _repeated(token: Tensor, x_BNM: Tensor) -> Tensor:
    """A learned vector [M], or several [R, M], for every row: [B, R, M]."""
    return token.view(1, -1, x_BNM.shape[2]).expand(len(x_BNM), -1, -1)


class LogMelInput(nn.Module):
    """Whisper's (Radford et al. 2022, arXiv 2212.04356): two convolutions over three frames, GELU (erf) after each, the
    second at every other frame. [B, F, S] -> [B, ceil(F / 2), M].

    Beyond a row's length both convolutions read zeros, as they do beyond the end of a row on its own.
    """

    def __init__(self, config: LogMelInputConfig, dims: Dims) -> None:
        super().__init__()
        self.first = nn.Conv1d(config.num_mels, dims.d_model, 3, padding=1)
        self.second = nn.Conv1d(dims.d_model, dims.d_model, 3, stride=2, padding=1)

    def forward(self, x_BFS: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        x_BFM = F.gelu(self.first(zero_padding(x_BFS, lengths_B).transpose(1, 2))).transpose(1, 2)
        return F.gelu(self.second(zero_padding(x_BFM, lengths_B).transpose(1, 2))).transpose(1, 2)


def resize_positions(table_TM: Tensor, grid: tuple[int, int], wanted: tuple[int, int]) -> Tensor:
    """The learned positions of `grid` rows and columns of patches, interpolated (bicubic) for another grid, after those
    of the class token and registers, which stay."""
    patches = grid[0] * grid[1]
    others_TM, patches_NM = torch.split(table_TM, [len(table_TM) - patches, patches])
    grid_1MHW = patches_NM.float().view(1, *grid, -1).permute(0, 3, 1, 2)
    resized_1MHW = F.interpolate(grid_1MHW, size=wanted, mode="bicubic", align_corners=False)
    return torch.cat((others_TM, resized_1MHW[0].flatten(1).T.to(table_TM.dtype)))


def zero_padding(x_BTM: Tensor, lengths_B: Tensor | None) -> Tensor:
    """The same with zeros beyond the first `lengths_B` vectors of each row; None: all are real."""
    if lengths_B is None:
        return x_BTM
    real_BT = torch.arange(x_BTM.shape[1], device=x_BTM.device) < lengths_B[:, None]
    return x_BTM.masked_fill(~real_BT[..., None], 0.0)


build.register(FeatureInputConfig, FeatureInput)
build.register(PatchInputConfig, PatchInput)
build.register(LogMelInputConfig, LogMelInput)
