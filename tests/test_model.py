import copy
import pickle

import numpy as np
import pytest
import torch

from remasker.errors import InvalidConfigError
from remasker.model import (
    BACKBONES,
    VALUE_ENCODINGS,
    MaskedAutoencoder,
    ModelConfig,
    quantile_bins,
)
from remasker.optimizer import VectorAdamW
from remasker.table import EncodedTable
from remasker.training import CellLoss, reconstruction_loss

N_CATEGORIES = (0, 3, 0, 0, 2)


def batch(n_rows=24, seed=0):
    random = np.random.default_rng(seed)
    values = random.normal(size=(n_rows, 5)).astype(np.float32)
    values[:, 1] = random.integers(3, size=n_rows)
    values[:, 4] = random.integers(2, size=n_rows)
    observed = random.random((n_rows, 5)) > 0.3
    visible = observed & (random.random((n_rows, 5)) > 0.4)
    return torch.from_numpy(values), torch.from_numpy(observed), torch.from_numpy(visible)


def build(**settings):
    config = ModelConfig(**{"width": 16, "encoder_depth": 2, "decoder_depth": 1, **settings})
    values, observed, _ = batch(200)
    edges = quantile_bins(values.numpy(), observed.numpy(), config.n_bins)
    torch.manual_seed(0)
    return MaskedAutoencoder(config, N_CATEGORIES, edges)


def flat(prediction):
    return torch.cat([part.flatten(1) for part in prediction], dim=1)


@pytest.fixture(
    params=[{"value_encoding": e} for e in VALUE_ENCODINGS]
    + [{"backbone": b} for b in BACKBONES[1:]]
    + [{"positions": "sinusoidal", "output": "shared_tanh", "value_encoding": "shared"}],
    ids=str,
)
def model(request):
    return build(**request.param)


@pytest.mark.parametrize("junk", [1e6, -3.0, float("nan")])
def test_what_is_not_visible_cannot_reach_a_prediction(model, junk):
    values, _, visible = batch()
    changed = torch.where(visible, values, torch.tensor(junk))
    with torch.no_grad():
        assert flat(model(values, visible)).equal(flat(model(changed, visible)))


def test_what_is_missing_cannot_reach_a_gradient(model):
    values, observed, visible = batch()
    table = EncodedTable(
        values=values.numpy(), observed=observed.numpy(), n_categories=N_CATEGORIES
    )
    loss = CellLoss(table)
    gradients = []
    for junk in (0.0, 1.0):
        model.zero_grad()
        stored = torch.where(observed, values, torch.tensor(junk))
        total = sum(reconstruction_loss(loss, model(stored, visible), stored, observed, visible))
        total.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(a.equal(b) for a, b in zip(*gradients, strict=True))


def test_a_hidden_value_cannot_influence_its_own_prediction(model):
    values, _, visible = batch()
    visible[:, 0] = False
    other = values.clone()
    other[:, 0] += 5
    with torch.no_grad():
        assert model(values, visible).value.equal(model(other, visible).value)


def test_a_row_does_not_depend_on_the_rows_beside_it(model):
    values, _, visible = batch()
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        together = flat(model(values, visible))
        shuffled = flat(model(values[order], visible[order]))
        alone = torch.cat([flat(model(values[i : i + 1], visible[i : i + 1])) for i in range(24)])
    torch.testing.assert_close(together[order], shuffled, atol=1e-5, rtol=0)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def test_a_row_with_nothing_visible_is_still_predicted(model):
    values, _, visible = batch()
    with torch.no_grad():
        assert flat(model(values, torch.zeros_like(visible))).isfinite().all()


def test_every_parameter_learns(model):
    values, observed, visible = batch(200)
    table = EncodedTable(
        values=values.numpy(), observed=observed.numpy(), n_categories=N_CATEGORIES
    )
    torch.nn.init.normal_(model.heads.scale_weight)
    parts = reconstruction_loss(CellLoss(table), model(values, visible), values, observed, visible)
    sum(parts).backward()
    idle = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert idle == []


def test_the_scale_head_does_not_move_the_rest():
    model = build()
    values, observed, visible = batch()
    torch.nn.init.normal_(model.heads.scale_weight)
    table = EncodedTable(
        values=values.numpy(), observed=observed.numpy(), n_categories=N_CATEGORIES
    )
    _, surprise = reconstruction_loss(
        CellLoss(table), model(values, visible), values, observed, visible
    )
    surprise.backward()
    moved = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert moved == {"heads.scale_weight", "heads.scale_bias"}


def test_loss_on_a_hand_computed_table():
    """2 × 3 cells: numbers (0.5, 2), a category with log-loss ln 2 over entropy ln 2."""
    from remasker.model import Prediction

    values = torch.tensor([[0.5, 2.0, 0.0], [1.0, 0.0, 1.0]])
    observed = torch.tensor([[True, True, True], [True, False, True]])
    visible = torch.tensor([[True, False, False], [False, False, True]])
    table = EncodedTable(values=values.numpy(), observed=observed.numpy(), n_categories=(0, 0, 2))
    prediction = Prediction(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 2))

    def loss(which):
        parts = reconstruction_loss(CellLoss(table), prediction, values, observed, visible, which)
        return [float(part) for part in parts]

    # re-masked: 2² + 1 (category) + 1² over three; visible: 0.5² + 1 (category) over two
    assert loss("remasked")[0] == pytest.approx(6 / 3)
    assert loss("visible")[0] == pytest.approx(1.25 / 2)
    assert loss("all")[0] == pytest.approx(6 / 3 + 1.25 / 2)
    # The scale head sees re-masked numbers only: half of the mean of 2² and 1².
    assert loss("all")[1] == pytest.approx(0.5 * (4 + 1) / 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 30}, r"width: expected a multiple of heads \(4\), got 30"),
        ({"encoder_depth": 0}, "encoder_depth: expected an integer of at least 1, got 0"),
        ({"value_encoding": "liner"}, "did you mean 'linear'"),
        ({"dropout": 2}, "dropout: expected a number from 0.0 to 0.9, got 2"),
    ],
)
def test_impossible_architectures_are_refused(settings, message):
    with pytest.raises(InvalidConfigError, match=message):
        ModelConfig(**settings)


@pytest.mark.parametrize(
    ("n_columns", "width", "heads"),
    [
        (280, 32, 4),
        *((n, w, h) for n in (1, 5, 40) for w, h in ((16, 1), (16, 4), (32, 4), (36, 3))),
    ],
)
def test_the_fast_blocks_equal_the_plain_ones(n_columns, width, heads):
    torch.manual_seed(0)
    config = ModelConfig(
        width=width, heads=heads, encoder_depth=2, decoder_depth=2, value_encoding="linear"
    )
    model = MaskedAutoencoder(config, (0,) * n_columns)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    values = torch.randn(19, n_columns)
    visible = torch.rand(19, n_columns) > 0.5
    visible[0] = False
    results = []
    for fast in (True, False):
        # The plain blocks in double precision are the truth.
        dtype = torch.float32 if fast else torch.float64
        model.to(dtype).fast = fast
        model.zero_grad()
        for _ in range(2):  # gradients are added to what is there
            prediction = model(values.to(dtype), visible)
            (prediction.value.sin().sum() + prediction.log_scale.cos().sum()).backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        with torch.inference_mode():
            inferred = model(values.to(dtype), visible).value
        results.append([prediction.value.detach(), inferred, *gradients])
    for fast, plain in zip(*results, strict=True):
        spread = float(plain.abs().max()) + 1.0
        torch.testing.assert_close(fast.double(), plain, atol=2e-5 * spread, rtol=0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_learns_by_itself(copied):
    values, _, visible = batch()
    model = build(value_encoding="linear")
    before = flat(model(values, visible)).detach()
    other = copied(model)
    optimizer = VectorAdamW(other)
    flat(other(values, visible)).square().sum().backward()
    optimizer.step(0.1)
    assert all(p.grad is None for p in model.parameters())
    with torch.no_grad():
        assert flat(model(values, visible)).equal(before)
        assert not flat(other(values, visible)).equal(before)
        other.fast = False
        plain = flat(other(values, visible))
        other.fast = True
        torch.testing.assert_close(flat(other(values, visible)), plain, atol=1e-4, rtol=1e-4)
