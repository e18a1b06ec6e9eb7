import copy

import numpy as np
import pytest
import torch

from remasker.errors import InvalidConfigError, TrainingDivergedError
from remasker.holdout import hold_out
from remasker.model import ModelConfig
from remasker.optimizer import VectorAdamW
from remasker.table import EncodedTable
from remasker.training import Trainer, TrainingConfig

SMALL = ModelConfig(width=16, encoder_depth=1, decoder_depth=1)


@pytest.fixture
def table():
    """Two correlated numbers, a third that follows them, and a category that follows the first."""
    random = np.random.default_rng(0)
    values = random.normal(size=(300, 4)).astype(np.float32)
    values[:, 1] = values[:, 0] + 0.1 * values[:, 1]
    values[:, 3] = values[:, 0] > 0
    observed = random.random((300, 4)) > 0.2
    return EncodedTable(
        values=np.where(observed, values, 0), observed=observed, n_categories=(0, 0, 0, 2)
    )


@pytest.fixture
def held_out(table):
    return hold_out(table.observed, 0.1, np.random.default_rng(0))


def train(table, held_out=None, seed=0, model=SMALL, **settings):
    config = TrainingConfig(**{"epochs": 6, **settings})
    trainer = Trainer(table, model, config, held_out=held_out, seed=seed)
    return trainer, list(trainer.epochs())


def same(a, b):
    return all(a[name].equal(b[name]) for name in a)


@pytest.mark.slow
def test_training_learns_what_there_is_to_learn(table, held_out):
    _, reports = train(table, held_out, epochs=40, learning_rate=5e-3)
    assert reports[-1].error < 0.6 * reports[0].error


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_same_seed_same_weights_whatever_the_global_state(table, held_out, dropout):
    model = ModelConfig(width=16, encoder_depth=1, decoder_depth=1, dropout=dropout)
    weights = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        weights.append(train(table, held_out, model=model)[0].member().weights)
        assert torch.get_rng_state().equal(before)
    assert same(*weights)
    assert not same(weights[0], train(table, held_out, seed=1, model=model)[0].member().weights)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_training_continued_from_a_checkpoint_equals_training_never_interrupted(
    table, held_out, dropout, tmp_path
):
    model = ModelConfig(width=16, encoder_depth=1, decoder_depth=1, dropout=dropout)
    whole, reports = train(table, held_out, model=model)
    config = TrainingConfig(epochs=6)
    first = Trainer(table, model, config, held_out=held_out)
    epochs = first.epochs()
    early = [next(epochs) for _ in range(3)]
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = Trainer(table, model, config, held_out=held_out, seed=99)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    late = list(second.epochs())
    assert [r.loss for r in early + late] == [r.loss for r in reports]
    assert [r.error for r in early + late] == [r.error for r in reports]
    assert same(whole.member().weights, second.member().weights)


def test_a_saved_state_does_not_change_when_training_goes_on(table):
    trainer = Trainer(table, SMALL, TrainingConfig(epochs=4))
    epochs = trainer.epochs()
    next(epochs)
    state = trainer.state_dict()
    kept = copy.deepcopy(state)
    next(epochs)
    tensors = {k: v for k, v in state["optimizer"].items() if k != "n_steps"}
    assert same(tensors, kept["optimizer"])


def test_held_out_cells_take_no_part_in_training(table, held_out):
    changed = EncodedTable(
        values=np.where(held_out, 1.0, table.values).astype(np.float32),
        observed=table.observed,
        n_categories=table.n_categories,
    )
    a, reports = train(table, held_out)
    b, other = train(changed, held_out)
    assert [r.loss for r in reports] == [r.loss for r in other]
    assert [r.error for r in reports] != [r.error for r in other]
    assert same(a.model.state_dict(), b.model.state_dict())


def test_patience_ends_training_early_and_keeps_the_best_epoch(table, held_out):
    trainer, reports = train(table, held_out, epochs=40, learning_rate=0.03, patience=3)
    judged = [r for r in reports if r.error is not None]
    best = min(judged, key=lambda report: report.error)
    member = trainer.member()
    assert (member.epochs, member.error) == (best.epoch, best.error)
    assert len(reports) == best.epoch + 3 < 40


def test_without_patience_the_last_epoch_is_kept(table, held_out):
    trainer, reports = train(table, held_out, epochs=10, learning_rate=0.03)
    assert trainer.member().epochs == 10
    assert trainer.member().error == reports[-1].error


def test_a_loss_that_is_not_a_number_is_an_error(table):
    broken = EncodedTable(
        values=np.where(table.observed, 1e30, 0).astype(np.float32),
        observed=table.observed,
        n_categories=(0, 0, 0, 0),
    )
    with pytest.raises(TrainingDivergedError, match="in epoch 1; lower learning_rate"):
        train(broken)


@pytest.mark.parametrize("rows", [1, 2, 65])
def test_batches_are_never_empty(table, rows):
    few = EncodedTable(
        values=table.values[:rows],
        observed=table.observed[:rows],
        n_categories=table.n_categories,
    )
    assert len(train(few, batch_size=64, epochs=2)[1]) == 2


@pytest.mark.parametrize("masking", ["uniform", "random_ratio", "copy", "proportional"])
@pytest.mark.parametrize("loss", ["all", "remasked", "visible"])
def test_every_masking_and_loss_trains(table, masking, loss):
    _, reports = train(table, masking=masking, loss=loss, epochs=2)
    assert all(np.isfinite(report.loss) for report in reports)


def test_a_training_too_large_for_this_machine_is_refused(monkeypatch):
    monkeypatch.setattr("remasker.memory.free_memory", lambda: 5e8)
    values = np.zeros((2000, 500), dtype=np.float32)
    table = EncodedTable(
        values=values, observed=np.ones_like(values, dtype=bool), n_categories=(0,) * 500
    )
    Trainer(table, ModelConfig(width=8), TrainingConfig(batch_size=16))
    with pytest.raises(InvalidConfigError, match=r"500 columns needs about .* lower batch_size"):
        Trainer(table, ModelConfig(), TrainingConfig(batch_size=512))


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_a_device_that_is_not_there_is_refused_in_words(table):
    with pytest.raises(InvalidConfigError, match="'cuda' was asked for, but torch finds none here"):
        Trainer(table, ModelConfig(width=8), TrainingConfig(epochs=1), device="cuda")


@pytest.mark.parametrize("clip", [0.5, float("inf")])
def test_the_compiled_optimizer_steps_like_the_plain_one(clip):
    def steps(dtype):
        torch.manual_seed(0)
        model = torch.nn.Linear(7, 3).to(dtype)
        optimizer = VectorAdamW(model, weight_decay=0.1, clip=clip, average=0.9)
        x = torch.randn(20, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
        for step in range(30):
            (model(x) - x[:, :3]).square().sum().backward()
            optimizer.step(0.01 / (1 + step))
        return [optimizer.vector, optimizer.averaged, optimizer.second, optimizer.gradient]

    # Double precision takes PyTorch's operations.
    for mine, plain in zip(steps(torch.float32), steps(torch.float64), strict=True):
        torch.testing.assert_close(mine.double(), plain, atol=1e-5, rtol=1e-4)
