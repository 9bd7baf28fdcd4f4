"""Multi-head latent attention: one short vector per token stands for its keys and values in all heads, and only that
is cached.

Shapes: B batch, T queries, S keys, M model width, N width of the source, H heads; P channels of a query or key without
a position, R that turn, D = P + R, E width of values; C rank of the latent vector, L = C + R.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qkv.config.attention import LatentAttentionConfig
from qkv.config.parts import RMSNormConfig
from qkv.nn.attention import call_mask
from qkv.nn.build import Dims, apply, build
from qkv.nn.cache import CrossCache, LayerCache
from qkv.nn.kernels import SdpaKernel
from qkv.nn.mask import Mask, Rule
from qkv.nn.position import NO_PHASES, Phases
from qkv.nn.score import Scoring
from qkv.nn.value_residual import FirstValues


class LatentAttention(nn.Module):
    """DeepSeek-V2 (DeepSeek-AI 2024, arXiv 2405.04434, 2.1). A token y is held as a latent vector c, of C numbers, and
    a key r, of R, which positions turn; head h has keys [K_h c | r] and values V_h c:

        c, r = norm(W_c y), turn(W_r y);   s = q_P (K_h c) + q_R r;   o = sum of softmax(s / sqrt(P + R)) V_h c

    Computed so, it is *expanded*. Since q (K_h c) = (K_h^T q) c, and V_h multiplies a sum of c as well as each, it is
    also the attention of H queries [K_h^T q_P | q_R] to one key [c | r] with the value c, and V_h of what they find:
    *absorbed*, without keys and values of any head. Many queries at once are cheaper expanded; a single one that reads
    a cache, absorbed.

    Where scaled rotary positions ask for it (YaRN of DeepSeek), they multiply the scores by a factor.
    """

    def __init__(self, config: LatentAttentionConfig, dims: Dims) -> None:
        super().__init__()
        config = config.complete(dims.d_model)
        assert config.kv_rank is not None
        assert config.nope_dim is not None
        assert config.rope_dim is not None
        assert config.value_dim is not None
        self.num_heads, self.kv_rank = config.num_heads, config.kv_rank
        self.nope_dim, self.rope_dim, self.value_dim = config.nope_dim, config.rope_dim, config.value_dim
        self.scale = (self.nope_dim + self.rope_dim) ** -0.5
        self.dropout = config.dropout
        norm, d_source = RMSNormConfig(), dims.d_source or dims.d_model
        self.query_down: nn.Module | None = None
        self.query_norm: nn.Module | None = None
        if config.q_rank is not None:
            self.query_down = nn.Linear(dims.d_model, config.q_rank, bias=False)
            self.query_norm = build(norm, dims.with_(d_model=config.q_rank))
        width = self.num_heads * (self.nope_dim + self.rope_dim)
        self.query_up = nn.Linear(config.q_rank or dims.d_model, width, bias=False)
        self.latent_down = nn.Linear(d_source, self.kv_rank + self.rope_dim, bias=False)
        self.fused = {"latent_down": (self.kv_rank, self.rope_dim)}  # rows of W_c and W_r, for the optimiser
        self.latent_norm: nn.Module = build(norm, dims.with_(d_model=self.kv_rank))
        self.key_up = nn.Linear(self.kv_rank, self.num_heads * self.nope_dim, bias=False)
        self.value_up = nn.Linear(self.kv_rank, self.num_heads * self.value_dim, bias=False)
        self.output = nn.Linear(self.num_heads * self.value_dim, dims.d_model, bias=False)
        self.kernel: nn.Module = SdpaKernel()

    def forward(
        self,
        x_BTM: Tensor,
        y_BSN: Tensor | None = None,
        *,
        mask: Mask | Rule | None = None,
        phases: Phases = NO_PHASES,
        cache: LayerCache | CrossCache | None = None,
        end: int = 0,
        first_values: FirstValues | None = None,
    ) -> Tensor:
        """[B, T, M] -> [B, T, M]. Arguments are those of `Attention`, but first_values: values are not mixed.

        A cache holds [c | r] in the place of keys, and nothing in that of values, which are a part of it.
        """
        if isinstance(cache, CrossCache):
            if cache.k_BGSD is None:
                assert y_BSN is not None
                cache.k_BGSD = self._latent(y_BSN, NO_PHASES)
                cache.v_BGSD = cache.k_BGSD[..., :0]
            latent_B1SL = cache.k_BGSD
        else:
            latent_B1SL = self._latent(x_BTM if y_BSN is None else y_BSN, phases)
        if not isinstance(mask, Mask):
            mask = call_mask(mask, x_BTM, latent_B1SL.shape[2])
        if isinstance(cache, LayerCache):
            latent_B1SL, _ = cache.append(latent_B1SL, latent_B1SL[..., :0], mask.q_slots, end)
        q_BTHD = self.query_up(apply(self.query_norm, apply(self.query_down, x_BTM))).unflatten(2, (self.num_heads, -1))
        q_BHTP, q_BHTR = q_BTHD.transpose(1, 2).split((self.nope_dim, self.rope_dim), dim=-1)
        scoring = Scoring(self.scale * phases.score_factor, bias=phases.bias)
        attend = self._absorbed if cache is not None and x_BTM.shape[1] == 1 else self._expanded
        out_BHTE = attend(q_BHTP, phases.rotate(q_BHTR), latent_B1SL, mask, scoring)
        out: Tensor = self.output(out_BHTE.transpose(1, 2).flatten(2))
        return out

    def _latent(self, y_BSN: Tensor, phases: Phases) -> Tensor:
        c_BSC, r_BSR = self.latent_down(y_BSN).split((self.kv_rank, self.rope_dim), dim=-1)
        return torch.cat((self.latent_norm(c_BSC).unsqueeze(1), phases.rotate(r_BSR.unsqueeze(1))), dim=-1)

    def _expanded(self, q_BHTP: Tensor, q_BHTR: Tensor, latent_B1SL: Tensor, mask: Mask, scoring: Scoring) -> Tensor:
        c_B1SC, r_B1SR = latent_B1SL[..., : self.kv_rank], latent_B1SL[..., self.kv_rank :]
        k_BHSP, v_BHSE = (
            up(c_B1SC.squeeze(1)).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for up in (self.key_up, self.value_up)
        )
        k_BHSD = torch.cat((k_BHSP, r_B1SR.expand(-1, self.num_heads, -1, -1)), dim=-1)
        return self._kernel(torch.cat((q_BHTP, q_BHTR), dim=-1), k_BHSD, v_BHSE, mask, scoring)

    def _absorbed(self, q_BHTP: Tensor, q_BHTR: Tensor, latent_B1SL: Tensor, mask: Mask, scoring: Scoring) -> Tensor:
        key_HPC, value_HEC = (up.weight.view(self.num_heads, -1, self.kv_rank) for up in (self.key_up, self.value_up))
        q_BHTL = torch.cat((q_BHTP @ key_HPC, q_BHTR), dim=-1)
        out_BHTC = self._kernel(q_BHTL, latent_B1SL, latent_B1SL[..., : self.kv_rank], mask, scoring)
        return out_BHTC @ value_HEC.transpose(1, 2)

    def _kernel(self, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, mask: Mask, scoring: Scoring) -> Tensor:
        out: Tensor = self.kernel(q_BHTD, k_BGSD, v_BGSE, mask, scoring, self.dropout if self.training else 0.0)
        return out

    def extra_repr(self) -> str:
        return (
            f"{self.num_heads} heads, rank {self.kv_rank}, "
            f"queries and keys of {self.nope_dim} + {self.rope_dim}, values of {self.value_dim}"
        )


build.register(LatentAttentionConfig, LatentAttention)
