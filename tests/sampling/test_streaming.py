"""Large runs: memory does not grow with the steps nor, if streamed, with the number of samples."""

import dataclasses
import gc

import pytest
import safetensors.torch
import torch
from torch import nn

import fmwc
from fmwc.errors import UsageError
from fmwc.field import attach
from fmwc.sampling import Reference, SamplingConfig, Standard, Trajectory, growing, read_with, sample, stream
from fmwc.sampling.config import ScoresOnly
from fmwc.state import channels
from tests.conftest import conv_field, dict_field, mlp_field
from tests.options import arguments

FIELDS = {"mlp": mlp_field, "conv": conv_field, "product": dict_field}


def referred(field, steps=10, score="temporal_ratio", estimator=None):
    """Return the field with a reference that has the settings of the tests."""
    run = sample(field, 50, steps=steps, seed=9)
    estimator = estimator or fmwc.sampling.default_estimator(field.space)
    field.reference = Reference(score, read_with(estimator, steps, "euler"), run.score(score).sort().values)
    return field


@pytest.mark.parametrize("name", FIELDS)
def test_recorded_scores_equal_those_of_full_runs(name):
    field = referred(FIELDS[name]())
    full, small = (sample(field, 12, steps=10, config=kind(batch=5)) for kind in (SamplingConfig, ScoresOnly))
    torch.testing.assert_close(small.score(), full.score())
    torch.testing.assert_close(small.confidence, full.confidence)
    torch.testing.assert_close(small.take(torch.tensor([3, 1])).score(), full.score()[[3, 1]])
    assert all(torch.equal(channels(small.x)[c], channels(full.x)[c]) for c in channels(full.x))


class Counting(nn.Module):
    """A velocity that counts the numbers in memory when it is called."""

    def __init__(self):
        super().__init__()
        self.layer, self.most = nn.Linear(64, 64), 0

    def forward(self, x, t):
        if bool((t > 0.85).all()):  # near the end, where memory is largest
            self.most = max(self.most, sum(o.numel() for o in gc.get_objects() if type(o) is torch.Tensor))
        return self.layer(x)


def test_memory_does_not_grow_with_the_steps():
    """A step keeps nothing; a reading keeps its time, variance and index, but not the 64 numbers of a velocity."""
    most = []
    for steps in (10, 100):
        field = attach(Counting(), space=(64,))
        sample(field, 32, steps=steps, config=ScoresOnly())
        most.append(field.network.most)
    # In addition: one more of the ten predicted ends with its time, and a flag for the first step.
    assert most[1] - most[0] <= 90 * 32 * 3 + 65 * 32 + 32


# ---- what fits ------------------------------------------------------------------------------------------------------

NO_MEMORY = {
    "a GPU": torch.OutOfMemoryError("CUDA out of memory."),
    "a CPU": RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: 12 bytes"),
}


class Narrow(nn.Module):
    """A velocity that raises an error for more than `room` samples."""

    def __init__(self, room, error):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.room, self.error, self.seen = nn.Linear(2, 2), room, error, []

    def forward(self, x, t):
        self.seen.append(len(x))
        if len(x) > self.room:
            raise self.error
        return self.layer(x)


@pytest.mark.parametrize("error", NO_MEMORY)
def test_a_batch_that_does_not_fit_is_halved_and_nothing_else_changes(error):
    wide, narrow = (attach(Narrow(room, NO_MEMORY[error]), space=(2,)) for room in (64, 6))
    options = {"steps": 4, "confidence": fmwc.estimators.Linearised(2), "decoder": "stochastic"}
    whole, done = sample(wide, 40, **arguments(**options)), []
    with pytest.warns(RuntimeWarning, match="memory") as said:
        parts = sample(narrow, 40, **arguments(progress=done.append, **options))
    assert len(said) == 1
    assert done == [5] * 8
    assert [n for n in narrow.network.seen if n > 6] == [40, 20, 10]  # the limit is searched only once
    torch.testing.assert_close(parts.x, whole.x)
    torch.testing.assert_close(parts.var, whole.var)


# ---- streams --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"decoder": "stochastic", "confidence": None}], ids=str)
def test_streamed_parts_equal_the_run(options):
    field = referred(mlp_field())
    options = {"steps": 10, "seed": 3, **options}
    whole = sample(field, 11, **arguments(**options))
    parts = list(stream(field, 11, **arguments(batch=4, **options)))
    assert [len(part) for part in parts] == [4, 4, 3]
    assert torch.equal(torch.cat([part.x0 for part in parts]), whole.x0)
    torch.testing.assert_close(torch.cat([part.x for part in parts]), whole.x)
    if "confidence" not in options:
        torch.testing.assert_close(torch.cat([part.confidence for part in parts]), whole.confidence)


def test_conditions_are_split_with_the_stream():
    seen = []

    def velocity(x, t, y, scale):
        seen.append((y.tolist(), float(scale)))
        return torch.zeros_like(x)

    options = {"space": (2,), "confidence": None, "steps": 1}
    for _ in stream(
        velocity, 5, **arguments(batch=2, cond={"y": torch.arange(5), "scale": torch.tensor(2.0)}, **options)
    ):
        pass
    assert seen == [([0, 1], 2.0), ([2, 3], 2.0), ([4], 2.0)]


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIELDS)
def test_streamed_file_equals_the_whole_file(name, tmp_path):
    field = referred(FIELDS[name]())
    y = torch.arange(11) % 2
    standard = Standard("y", torch.zeros(2), torch.ones(2))

    def classed(part, rows):
        return dataclasses.replace(part, cond={"y": rows}, standard=standard, made={"by": "hand"})

    parts = list(stream(field, 11, steps=10, config=SamplingConfig(batch=4)))
    with growing(tmp_path / "grown.safetensors", 11) as add:
        for part, rows in zip(parts, y.split(4), strict=True):
            add(classed(part, rows))
            assert not (tmp_path / "grown.safetensors").exists()
    classed(sample(field, 11, steps=10, config=ScoresOnly(batch=4)), y).save(tmp_path / "whole.safetensors")
    grown, whole = (Trajectory.load(tmp_path / f"{n}.safetensors") for n in ("grown", "whole"))
    assert grown.about() == whole.about()
    files = [safetensors.torch.load_file(tmp_path / f"{n}.safetensors") for n in ("grown", "whole")]
    torch.testing.assert_close(files[1].pop("rank"), grown.rank)  # which no part has
    torch.testing.assert_close(*files)


def test_incomplete_files_do_not_appear(tmp_path):
    parts = stream(referred(mlp_field()), 8, steps=10, config=SamplingConfig(batch=4))
    with pytest.raises(UsageError, match="samples"), growing(tmp_path / "a", 8) as add:
        add(next(parts))
    full = sample(mlp_field(), 4, steps=10)
    with pytest.raises(UsageError, match="batch"), growing(tmp_path / "a", 4) as add:
        add(full)
    assert not list(tmp_path.iterdir())
