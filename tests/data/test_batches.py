"""Training on a Dataset, a DataLoader or an iterable: reproducible, resumable, loaded batch by batch."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fmwc.data.batches import Batches
from fmwc.errors import DataError, NotFiniteError, ShapeError, UsageError
from fmwc.training import TrainingConfig, fit_noise, train
from tests.conftest import mlp_field
from tests.recipes.conftest import identical, weights

ROWS = torch.randn(40, 2, generator=torch.Generator().manual_seed(8)) * 0.3 + 1


class Labelled(Dataset):
    """Rows with a class, and noise from torch's global generator."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        return ROWS[i] + 1e-3 * torch.randn(2), {"y": i % 3}


class Streamed(IterableDataset):
    def __iter__(self):
        return iter(ROWS)


SOURCES = {
    "a dataset of tensors": lambda: TensorDataset(ROWS),
    "a dataset that streams": Streamed,
    "a loader": lambda: DataLoader(TensorDataset(ROWS), 16, shuffle=True),
    "a generator": lambda: (ROWS[torch.randint(40, (16,))] for _ in range(100)),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_noise_is_fitted_to_batches_of_any_source(kind):
    fields = [mlp_field(), mlp_field()]
    before, state = weights(fields[0]), torch.get_rng_state()
    for field in fields:
        history = fit_noise(field, SOURCES[kind](), 12, batch=16, lr=1e-2)
        assert history[-1][0] == 12
        assert field.reference is not None
    assert identical(weights(fields[0]), weights(fields[1]))  # all randomness depends on the seed
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in weights(fields[0].network).items():
        assert torch.equal(value, before[f"network.{name}"])
    assert not identical(weights(fields[0]), before)


@pytest.mark.parametrize("source", [Labelled, lambda: ((row + 0.1, {"y": torch.arange(8)}) for row in ROWS.split(8))])
@pytest.mark.parametrize("stop_at", [3, 4])
def test_an_interrupted_training_resumes_in_the_sequence_of_batches(source, stop_at, tmp_path):
    plan = TrainingConfig(5, batch=8, lr=1e-2, seed=3, save_every=1)

    def run(net, stop=None, resume=None):
        steps = 0

        def loss(x1, randomness, beta, cond):
            nonlocal steps
            steps += 1
            if steps == stop:
                raise KeyboardInterrupt
            return (net(x1) - cond["y"][:, None]).square().mean() + 0 * randomness.normal(x1).sum()

        train(net, loss, source(), plan, resume=resume)

    def net():
        torch.manual_seed(0)
        return nn.Linear(2, 1)

    whole, killed = net(), net()
    run(whole)
    with pytest.raises(KeyboardInterrupt):
        run(killed, stop_at, tmp_path / "point")
    run(killed, resume=tmp_path / "point")
    assert identical(weights(whole), weights(killed))


class Numbered(Dataset):
    """Rows with their number, and a random number."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        return ROWS[i], {"number": i, "random": torch.rand(())}


LOADERS = {
    "by index": lambda: DataLoader(Numbered(), 7, shuffle=True),
    "generator": lambda: DataLoader(Numbered(), 7, shuffle=True, generator=torch.Generator().manual_seed(2)),
    "workers": lambda: DataLoader(Numbered(), 7, shuffle=True, num_workers=1),
    "batches of the dataset": lambda: DataLoader(
        [(rows, {"number": numbers}) for rows, numbers in zip(ROWS.split(7), torch.arange(40).split(7), strict=True)],
        batch_size=None,
    ),
    "iterable": lambda: ((rows, {"number": rows[:, 0]}) for _ in range(3) for rows in ROWS.split(7)),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_processes_share_every_batch(kind):
    """Parts of 1, 2 and 3 processes make up the same batches, also after the first ones were read or skipped."""
    whole = Batches(LOADERS[kind](), 8, 5)
    expected = [whole.draw() for _ in range(9)]  # more than one pass
    for count in (1, 2, 3):
        sources = [Batches(LOADERS[kind](), 8, 5, part=(index, count)) for index in range(count)]
        heads = [source.head()[0] for source in sources]
        assert all(torch.equal(head, heads[0]) and len(head) >= 40 for head in heads)
        for batch in expected[:4]:
            parts = [source.draw_part() for source in sources]
            assert {part.total for part in parts} == {len(batch[0])}
            for part in parts:
                assert torch.equal(part.x, batch[0][part.samples])
                assert torch.equal(part.cond["number"], batch[1]["number"][part.samples])
            assert sorted(torch.cat([part.samples for part in parts]).tolist()) == list(range(len(batch[0])))
        if kind in ("by index", "workers"):
            numbers = torch.cat([part.cond["random"] for part in parts])
            assert count == 1 or len(numbers.unique()) == len(numbers)  # random transforms differ
            (late := Batches(LOADERS[kind](), 8, 5, part=(0, count))).skip(8)
            assert torch.equal((last := late.draw_part()).x, expected[8][0][last.samples])


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (TensorDataset(ROWS, torch.arange(40)), UsageError, "parts"),
        (iter([ROWS]), DataError, "ended"),
        (iter([(ROWS, {"y": torch.arange(3)})]), ShapeError, "row"),
        (iter([ROWS / 0]), NotFiniteError, "training"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_unusable_sources_are_refused(source, error, message):
    net = nn.Linear(2, 1)
    with pytest.raises(error, match=message):
        train(net, lambda x1, r, beta, cond: net(x1).square().mean(), source, TrainingConfig(3, batch=8))
