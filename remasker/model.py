"""The masked autoencoder: a row is a sequence of tokens, one per column.

The model is a deterministic function of ``(values, visible)``: what is not visible is replaced by
zero before anything else happens, so it can reach neither a prediction nor a gradient.

Shapes: B rows, d columns, w width, K levels of all categorical columns together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remasker.blocks import Packing, Weights, run_blocks
from remasker.errors import InvalidConfigError, check_choice, check_integer, check_number

VALUE_ENCODINGS = ("shared", "linear", "periodic", "piecewise_linear")
BACKBONES = ("transformer", "linear", "convolution")
OUTPUTS = ("per_column", "shared_tanh")
POSITIONS = ("learned", "sinusoidal")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture.

    >>> ModelConfig(width=32).heads
    4
    >>> ModelConfig(width=30)
    Traceback (most recent call last):
    remasker.errors.InvalidConfigError: width: expected a multiple of heads (4), got 30
    """

    encoder_depth: int = 3
    decoder_depth: int = 1
    width: int = 32
    heads: int = 4
    mlp_ratio: float = 2.0
    value_encoding: str = "piecewise_linear"
    n_bins: int = 12
    linear_skip: bool = True
    positions: str = "learned"
    output: str = "per_column"
    backbone: str = "transformer"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_integer("encoder_depth", self.encoder_depth, 1)
        check_integer("decoder_depth", self.decoder_depth, 1)
        check_integer("width", self.width, 2)
        check_integer("heads", self.heads, 1)
        check_integer("n_bins", self.n_bins, 2)
        check_number("mlp_ratio", self.mlp_ratio, 0.0, 16.0, open_low=True)
        check_number("dropout", self.dropout, 0.0, 0.9)
        check_choice("value_encoding", self.value_encoding, VALUE_ENCODINGS)
        check_choice("positions", self.positions, POSITIONS)
        check_choice("output", self.output, OUTPUTS)
        check_choice("backbone", self.backbone, BACKBONES)
        if self.width % self.heads:
            raise InvalidConfigError(
                f"width: expected a multiple of heads ({self.heads}), got {self.width}"
            )


class Prediction(NamedTuple):
    """What the decoder says of every cell, visible or not."""

    value: Tensor  # B × d, scaled numbers
    log_scale: Tensor  # B × d, logarithm of the expected error of `value`
    logits: Tensor  # B × K, levels of the categorical columns side by side


class MaskedAutoencoder(nn.Module):
    """Encoder, decoder and heads.

    `n_categories` has an entry per column, 0 for a number. `bin_edges` (d × n_bins+1) is needed by
    the piecewise-linear encoding only.

    >>> model = MaskedAutoencoder(ModelConfig(value_encoding="linear"), n_categories=(0, 3))
    >>> values, visible = torch.zeros(5, 2), torch.ones(5, 2, dtype=torch.bool)
    >>> prediction = model(values, visible)
    >>> tuple(prediction.value.shape), tuple(prediction.logits.shape)
    ((5, 2), (5, 3))
    """

    numeric: Tensor

    def __init__(
        self,
        config: ModelConfig,
        n_categories: tuple[int, ...],
        bin_edges: np.ndarray | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.n_categories = n_categories
        d, w = len(n_categories), config.width
        self.embedding = CellEmbedding(config, n_categories, bin_edges)
        self.encoder_class = nn.Parameter(torch.randn(w) * 0.02)
        self.encoder: Iterable[Block] = blocks(config, config.encoder_depth, d + 1)
        self.encoder_norm = nn.LayerNorm(w)
        self.bridge = nn.Linear(w, w)
        self.mask_token = nn.Parameter(torch.randn(w) * 0.02)
        self.decoder_position = positions(config, d)
        self.decoder: Iterable[Block] = blocks(config, config.decoder_depth, d + 1)
        self.decoder_norm = nn.LayerNorm(w)
        self.heads = Heads(config, n_categories)
        #: Whether to run `remasker.kernels` instead of the plain blocks (on CPU).
        self.fast = config.backbone == "transformer" and config.dropout == 0
        self._packings: dict[int, Packing] = {}
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        numeric = torch.tensor([k == 0 for k in n_categories])
        self.register_buffer("numeric", numeric, persistent=False)
        self.skip = nn.Linear(2 * d, d) if config.linear_skip else None
        if self.skip is not None:
            nn.init.zeros_(self.skip.weight)
            nn.init.zeros_(self.skip.bias)

    def forward(self, values: Tensor, visible: Tensor) -> Prediction:
        """Predict every cell of a batch from its visible cells."""
        shown = torch.where(visible, values, 0.0)
        fast = self.fast and shown.device.type == "cpu" and shown.dtype == torch.float32
        prediction = self.heads((self._packed if fast else self._plain)(shown, visible))
        if self.skip is None:
            return prediction
        # Departs from the paper: what is linear need not be learned by attention, which on small
        # tables takes many more steps to find it.
        linear = self.skip(torch.cat([shown * self.numeric, visible.to(shown.dtype)], dim=1))
        return prediction._replace(value=prediction.value + linear)

    def _plain(self, shown: Tensor, visible: Tensor) -> Tensor:
        """Visible cells -> B × d × w: what the decoder makes of every cell."""
        tokens, keys = self._embed(shown), F.pad(visible, (1, 0), value=True)
        for block in self.encoder:
            tokens = block(tokens, keys)
        tokens = self.bridge(self.encoder_norm(tokens))
        cells = torch.where(visible.unsqueeze(-1), tokens[:, 1:], self.mask_token)
        tokens = torch.cat([tokens[:, :1], cells + self.decoder_position], dim=1)
        for block in self.decoder:
            tokens = block(tokens, None)
        return self.decoder_norm(tokens[:, 1:])

    def _packed(self, shown: Tensor, visible: Tensor) -> Tensor:
        """The same by `remasker.kernels`: the encoder sees nothing but the tokens that exist."""
        tokens, width = self._embed(shown), self.config.width
        packing = Packing(F.pad(visible, (1, 0), value=True), self.config.heads)
        packed = tokens.reshape(-1, width).index_select(0, packing.keep)
        packed = run_blocks(packed, [block.weights for block in self.encoder], packing)
        packed = self.bridge(self.encoder_norm(packed))
        # Cells without a token read the row behind the packed ones.
        cells = torch.cat([packed, self.mask_token[None]]).index_select(0, packing.spread)
        cells = cells.view_as(tokens) + F.pad(self.decoder_position, (0, 0, 1, 0))
        everyone = self._all_present(len(tokens), tokens.shape[1])
        blocks = [block.weights for block in self.decoder]
        decoded = run_blocks(cells.reshape(-1, width), blocks, everyone)
        return self.decoder_norm(decoded.view_as(tokens)[:, 1:])

    def _embed(self, shown: Tensor) -> Tensor:
        """B × (1 + d) × w; what stands at invisible cells means nothing."""
        first = self.encoder_class.expand(len(shown), 1, -1)
        return torch.cat([first, self.embedding(shown)], dim=1)

    def _all_present(self, n_rows: int, n_tokens: int) -> Packing:
        if n_rows not in self._packings:
            # Batches of an epoch have at most two sizes: a few packings serve all of them.
            self._packings = dict(list(self._packings.items())[-3:])
            present = torch.ones((n_rows, n_tokens), dtype=torch.bool)
            self._packings[n_rows] = Packing(present, self.config.heads)
        return self._packings[n_rows]


class CellEmbedding(nn.Module):
    """A cell's value and column -> a vector. B × d -> B × d × w."""

    category_offset: Tensor
    categorical: Tensor
    bin_left: Tensor
    bin_width: Tensor

    def __init__(
        self, config: ModelConfig, n_categories: tuple[int, ...], bin_edges: np.ndarray | None
    ) -> None:
        super().__init__()
        self.value_encoding = config.value_encoding
        d, w = len(n_categories), config.width
        self.position = positions(config, d)
        levels = np.array(n_categories, dtype=int)
        self.any_categories = bool(levels.any())
        if self.any_categories:
            offsets = np.concatenate([[0], np.cumsum(levels)[:-1]])
            self.register_buffer("category_offset", torch.from_numpy(offsets), persistent=False)
            self.register_buffer("categorical", torch.from_numpy(levels > 0), persistent=False)
            self.category = nn.Parameter(torch.randn(int(levels.sum()), w) * w**-0.5)
        if self.value_encoding == "shared":
            self.weight = nn.Parameter(torch.empty(w))
            nn.init.uniform_(self.weight, -1, 1)
            self.bias = nn.Parameter(torch.zeros(w))
            return
        n_features = {"linear": 1, "periodic": 2 * config.n_bins, "piecewise_linear": config.n_bins}
        k = n_features[self.value_encoding]
        # Departs from the paper: every column has its own weights. A number's own direction is
        # always there; the richer encodings add to it.
        self.weight = nn.Parameter(torch.randn(d, w) * w**-0.5)
        if self.value_encoding == "periodic":
            self.frequency = nn.Parameter(torch.randn(d, config.n_bins) * 0.5)
        if self.value_encoding == "piecewise_linear":
            if bin_edges is None:
                raise InvalidConfigError("value_encoding 'piecewise_linear' needs bin_edges")
            edges = torch.as_tensor(bin_edges, dtype=torch.float32)
            self.register_buffer("bin_left", edges[:, :-1].clone())
            self.register_buffer("bin_width", edges.diff(dim=1).clamp(min=1e-6))
        if k > 1:
            self.features = nn.Parameter(torch.randn(d, k, w) * (k * w) ** -0.5)

    def forward(self, values: Tensor) -> Tensor:
        """Embed cells; invisible ones hold zero."""
        if self.value_encoding == "shared":
            tokens = values.unsqueeze(-1) * self.weight + self.bias
        else:
            tokens = values.unsqueeze(-1) * self.weight
        if self.value_encoding == "periodic":
            phase = 2 * math.pi * values.unsqueeze(-1) * self.frequency
            features = torch.cat([phase.sin(), phase.cos()], dim=-1)
            tokens = tokens + torch.einsum("bdk,dkw->bdw", features, self.features)
        elif self.value_encoding == "piecewise_linear":
            features = ((values.unsqueeze(-1) - self.bin_left) / self.bin_width).clamp(0, 1)
            tokens = tokens + torch.einsum("bdk,dkw->bdw", features, self.features)
        if self.any_categories:
            codes = (values * self.categorical).long() + self.category_offset
            levels = F.embedding(codes.clamp(max=len(self.category) - 1), self.category)
            tokens = torch.where(self.categorical.unsqueeze(-1), levels, tokens)
        return tokens + self.position


class Block(nn.Module):
    """Pre-norm Transformer block; `keys` marks the tokens that may be looked at (None: all)."""

    def __init__(self, config: ModelConfig, length: int) -> None:
        super().__init__()
        w, hidden = config.width, int(config.width * config.mlp_ratio)
        self.n_heads = config.heads
        self.backbone = config.backbone
        self.dropout = config.dropout
        self.mix_norm = nn.LayerNorm(w)
        if self.backbone == "transformer":
            self.qkv = nn.Linear(w, 3 * w)
        elif self.backbone == "linear":
            self.tokens = nn.Linear(length, length)
        else:
            self.convolution = nn.Conv1d(w, w, kernel_size=3, padding=1)
        self.project = nn.Linear(w, w)
        self.mlp_norm = nn.LayerNorm(w)
        self.expand = nn.Linear(w, hidden)
        self.contract = nn.Linear(hidden, w)

    @property
    def weights(self) -> Weights:
        """In the order that `remasker.kernels` expects; looked up once."""
        if "_weights" not in self.__dict__:
            self.__dict__["_weights"] = Weights(list(self.parameters()))
        return self.__dict__["_weights"]

    def forward(self, tokens: Tensor, keys: Tensor | None) -> Tensor:
        """B × L × w -> B × L × w."""
        tokens = tokens + self._drop(self.project(self._mix(self.mix_norm(tokens), keys)))
        hidden = F.gelu(self.expand(self.mlp_norm(tokens)))
        return tokens + self._drop(self.contract(hidden))

    def _mix(self, tokens: Tensor, keys: Tensor | None) -> Tensor:
        if self.backbone == "transformer":
            q, k, v = self.qkv(tokens).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
            allowed = None if keys is None else keys[:, None, None, :]
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
            return mixed.transpose(1, 2).flatten(2)
        if keys is not None:
            tokens = tokens * keys.unsqueeze(-1)
        if self.backbone == "linear":
            return self.tokens(tokens.transpose(1, 2)).transpose(1, 2)
        return self.convolution(tokens.transpose(1, 2)).transpose(1, 2)

    def _drop(self, tokens: Tensor) -> Tensor:
        return F.dropout(tokens, self.dropout, self.training) if self.dropout else tokens


class Heads(nn.Module):
    """Decoder output -> a number with its scale, or logits over levels, per column."""

    def __init__(self, config: ModelConfig, n_categories: tuple[int, ...]) -> None:
        super().__init__()
        self.n_categories = n_categories
        self.output = config.output
        d, w = len(n_categories), config.width
        # Departs from the paper: a head per column, linear, so that predictions may leave the range
        # seen in `fit`; "shared_tanh" is the paper's.
        rows = 1 if self.output == "shared_tanh" else d
        self.value_weight = nn.Parameter(torch.randn(rows, w) * w**-0.5)
        self.value_bias = nn.Parameter(torch.zeros(rows))
        self.scale_weight = nn.Parameter(torch.zeros(d, w))
        self.scale_bias = nn.Parameter(torch.zeros(d))
        n_levels = sum(n_categories)
        self.level_weight = nn.Parameter(torch.randn(n_levels, w) * w**-0.5)
        self.level_bias = nn.Parameter(torch.zeros(n_levels))

    def forward(self, tokens: Tensor) -> Prediction:
        """B × d × w -> predictions for every cell."""
        value = (tokens * self.value_weight).sum(-1) + self.value_bias
        if self.output == "shared_tanh":
            value = (torch.tanh(value) + 1) / 2
        # The scale learns from what the model knows without changing it.
        log_scale = (tokens.detach() * self.scale_weight).sum(-1) + self.scale_bias
        logits, start = [], 0
        for j, k in enumerate(self.n_categories):
            if k:
                weight = self.level_weight[start : start + k]
                logits.append(F.linear(tokens[:, j], weight, self.level_bias[start : start + k]))
                start += k
        joined = torch.cat(logits, dim=1) if logits else value.new_zeros(len(value), 0)
        return Prediction(value, log_scale.clamp(-7.0, 3.0), joined)


def blocks(config: ModelConfig, depth: int, length: int) -> Any:
    """A stack of blocks, which a module keeps as its own.

    >>> len(blocks(ModelConfig(), depth=2, length=5))
    2
    """
    return nn.ModuleList(Block(config, length) for _ in range(depth))


def positions(config: ModelConfig, n_columns: int) -> nn.Parameter:
    """Column embeddings, d × w: learned, or the paper's fixed sine and cosine.

    >>> positions(ModelConfig(positions="sinusoidal"), 3).requires_grad
    False
    """
    w = config.width
    if config.positions == "learned":
        return nn.Parameter(torch.randn(n_columns, w) * w**-0.5)
    # Position 0 belongs to the class token.
    k = torch.arange(1, n_columns + 1, dtype=torch.float32).unsqueeze(1)
    rates = 10000 ** (-torch.arange(0, w, 2, dtype=torch.float32) / w)
    table = torch.stack([(k * rates).sin(), (k * rates).cos()], dim=-1).flatten(1)[:, :w]
    return nn.Parameter(table, requires_grad=False)


def quantile_bins(values: np.ndarray, observed: np.ndarray, n_bins: int) -> np.ndarray:
    """Edges of the piecewise-linear encoding: quantiles of each column's observed cells.

    >>> quantile_bins(np.arange(5.0)[:, None], np.ones((5, 1), bool), 2).tolist()
    [[0.0, 2.0, 4.0]]
    """
    edges = np.zeros((values.shape[1], n_bins + 1), dtype=np.float32)
    for j in range(values.shape[1]):
        present = values[observed[:, j], j]
        if len(present):
            edges[j] = np.quantile(present, np.linspace(0, 1, n_bins + 1))
    return edges
