"""Callbacks of Lightning: report the confidence of samples while training, and fit the noise when it ends.

>>> callbacks = [ConfidenceCallback("net"), FitNoise("net", path="field")]  # doctest: +SKIP
>>> lightning.Trainer(callbacks=callbacks).fit(module, train, validation)  # doctest: +SKIP

The callbacks work with the packages `lightning` and `pytorch_lightning`. Give them to the trainer in a list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from fmwc import checkpoint
from fmwc.calibration import auroc
from fmwc.checks import choose_check, run_checks
from fmwc.errors import ShapeError, UsageError
from fmwc.field import Field, attach
from fmwc.flow import as_space, euclidean
from fmwc.processes import Processes
from fmwc.sampling import SamplingConfig, Trajectory, sample
from fmwc.state import as_conditions, as_whole, batch_size, require_labels, select, tree_map
from fmwc.training import fit_noise

Callback: Any
try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError:
        Callback = object

__all__ = ["ConfidenceCallback", "FitNoise"]

DOUBTFUL = 0.95  # quantile of the scores of validation data, above which a sample is doubtful

Convert = Callable[[Any], Any]


class _WithNetwork(Callback):
    """Callback that finds the velocity network of a module, and the samples in its batches.

    Arguments:
        network: The name of the attribute of the module that holds the velocity network (`"net"`), or a function of the
            module that returns it, such as `lambda module: fmwc.adapters.adapt(module.net, time_first=True)`.
        batch: A function that returns the samples of a batch, or a pair of the samples and their conditions by name. By
            default, a batch is `x` or `(x, {"y": y})`.
    """

    def __init__(self, network: str | Callable[[Any], nn.Module], batch: Convert | None) -> None:
        if Callback is object:
            raise UsageError("the callback needs Lightning: pip install 'fmwc[lightning]'")
        super().__init__()
        self.network, self.batch = network, batch

    def _network(self, module: Any) -> nn.Module:
        found = getattr(module, self.network, None) if isinstance(self.network, str) else self.network(module)
        if not isinstance(found, nn.Module):
            what = f"attribute '{self.network}'" if isinstance(self.network, str) else "the function network"
            raise UsageError(
                f"{what} of {type(module).__name__} must give a torch module, got {type(found).__name__}; give "
                "network= the name of the attribute that holds the velocity network"
            )
        return found

    def _split(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Return the samples of a batch and their conditions."""
        given = batch if self.batch is None else self.batch(batch)
        x, cond = given if isinstance(given, (tuple, list)) and len(given) == 2 else (given, None)
        if isinstance(x, (tuple, list)) or not isinstance(cond, (Mapping, type(None))):
            raise UsageError(
                "a batch must be x or (x, {'y': y}); give batch=, a function that returns this, such as "
                "lambda batch: (batch[0], {'y': batch[1]})"
            )
        return x, as_conditions(cond)


class ConfidenceCallback(_WithNetwork):
    """Callback that draws samples at each validation, and logs how well the network explains them.

    As many samples are drawn as validation data are kept, with the conditions of these data. Both are checked in the
    same way: by a contest of classes if there is one discrete condition, else by an echo (:mod:`fmwc.checks`). This
    needs no noise model. The confidence of a sample is the share of validation data with a higher score. The log has

    - `confidence/mean`, the mean confidence: 0.5 if the samples are like the data, and lower if they are worse;
    - `confidence/doubtful`, the share of samples whose score exceeds that of 95 % of the data: 0.05 if they are alike;
    - `confidence/score` and `confidence/data_score`, the mean scores;
    - with `labels`, `confidence/failed`, the share of failures, and `confidence/auroc`, how well the score finds them.

    In a distributed run, each process checks its part of the validation data, and the log has the means over processes.
    `confidence/auroc` is the mean over those with both failures and successes, and is left out if there are none.

    Arguments:
        network: As in :class:`FitNoise`.
        batch: As in :class:`FitNoise`.
        count: The number of samples.
        steps: The number of steps of a sample.
        check: The evaluations per sample of the check, or a check such as `Echo(...)`. A contest takes at least as many
            as there are classes; with fewer, the check is an echo.
        labels: A function `(x, cond) -> (B,)` that returns which samples failed.
        space: The space of the samples, or the shape of one; flat by default.
        every: Validations between two reports.
        seed: The seed of the samples, which are the same in all reports up to the changes of the network.
        prefix: The first part of the names in the log.
        show: Called with the trainer, the module and the run of samples, to log images: `run.x` and `run.rank`.

    Attributes:
        run: The latest samples, ranked by their score.
    """

    def __init__(
        self,
        network: str | Callable[[Any], nn.Module],
        *,
        batch: Convert | None = None,
        count: int = 64,
        steps: int = 50,
        check: Any = 8,
        labels: Callable[..., Any] | None = None,
        space: Any = None,
        every: int = 1,
        seed: int = 0,
        prefix: str = "confidence",
        show: Callable[[Any, Any, Trajectory], None] | None = None,
    ) -> None:
        super().__init__(network, batch)
        self.count, self.steps = as_whole(count, "count", 2), as_whole(steps, "steps", 1)
        self.check, self.labels, self.space, self.show = check, labels, space, show
        self.every, self.seed, self.prefix = as_whole(every, "every", 1), as_whole(seed, "seed"), prefix
        self.run: Trajectory | None = None
        self._validations = 0
        self._kept: list[tuple[Any, dict[str, Any]]] = []

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Forget the data of the validation before."""
        self._kept = []

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keep the first validation data."""
        if sum(batch_size(x) for x, _ in self._kept) < self.count:
            self._kept.append(self._split(batch))

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Draw samples, check them and the data, and log the comparison."""
        if trainer.sanity_checking or not self._kept:
            return
        self._validations += 1
        if (self._validations - 1) % self.every:
            return
        x, cond = _joined(self._kept)
        x = tree_map(lambda c: c.to(pl_module.device), select(x, slice(0, self.count)))
        cond = {name: value[: self.count].to(pl_module.device) for name, value in cond.items()}
        values = self._compared(self._network(pl_module), x, cond)
        if "auroc" in values:  # all processes must log the same names
            everywhere = pl_module.all_gather(torch.tensor(values.pop("auroc"), device=pl_module.device))
            if not everywhere.isnan().all():
                values["auroc"] = float(everywhere.nanmean())
        pl_module.log_dict({f"{self.prefix}/{name}": value for name, value in values.items()}, sync_dist=True)
        if self.show is not None:
            assert self.run is not None
            self.show(trainer, pl_module, self.run)

    def _compared(self, network: nn.Module, x: Any, cond: dict[str, Tensor]) -> dict[str, float]:
        """Draw samples and return what is logged."""
        count = batch_size(x)
        space = euclidean(tuple(x.shape[1:])) if self.space is None else as_space(self.space)
        check = self.check
        if not hasattr(check, "name"):
            try:
                check = choose_check(space, cond, self.check)
            except UsageError:  # too few evaluations for a contest between so many classes
                check = choose_check(space, cond, self.check, evidence="echo")
        config = SamplingConfig(space=space)
        run = sample(
            network, count, steps=self.steps, seed=self.seed, cond=cond, confidence=None, check=check, config=config
        )
        data = run_checks({check.name: check}, network, space, x, cond, self.seed, 0)[check.name]
        score = run.evidence[check.name]
        self.run = run.ranked_by(check.name)
        values = {
            "mean": (data[None] > score[:, None]).float().mean(),
            "doubtful": (score > data.quantile(DOUBTFUL)).float().mean(),
            "score": score.mean(),
            "data_score": data.mean(),
        }
        if self.labels is not None:
            found = require_labels(self.labels(run.x, run.cond), "the result of labels")
            failed = torch.from_numpy(found).to(score.device)
            if failed.shape != score.shape:
                raise ShapeError(
                    f"labels must return one value per sample, ({count},), got shape {tuple(failed.shape)}"
                )
            values["failed"] = failed.float().mean()
            both = 0 < int(failed.sum()) < count
            values["auroc"] = torch.tensor(auroc(score[failed], score[~failed]) if both else torch.nan)
        return {name: float(value) for name, value in values.items()}


class FitNoise(_WithNetwork):
    """Callback that fits the noise of the trained network on the trainer's data when the training ends.

    The network is frozen while its noise is fitted (:func:`fmwc.fit_noise`). In a distributed run, every process trains
    a part of each batch, and the first one saves the field. A batch then has the samples of one batch of each process.

    Arguments:
        network: The name of the attribute of the module that holds the velocity network (`"net"`), or a function of the
            module that returns it, such as `lambda module: fmwc.adapters.adapt(module.net, time_first=True)`.
        steps: The number of optimiser steps.
        batch: A function that returns the samples of a batch, or a pair of the samples and their conditions by name. By
            default, a batch is `x` or `(x, {"y": y})`.
        path: The folder of the checkpoint (:func:`fmwc.save`); not saved if `None`.
        space: The space of the samples, or the shape of one; taken from the data by default.
        options: Those of :func:`fmwc.fit_noise`.

    Attributes:
        field: The field, after the training.
    """

    def __init__(
        self,
        network: str | Callable[[Any], nn.Module],
        steps: int = 500,
        *,
        batch: Convert | None = None,
        path: str | Path | None = None,
        space: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(network, batch)
        self.steps, self.path, self.space, self.options = as_whole(steps, "steps", 1), path, space, options
        self.field: Field | None = None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Fit the noise, and save the field."""
        network = self._network(pl_module)
        Processes().copy_from_first(network.buffers())  # batch norms have seen different samples
        self.field = attach(network, space=self.space)
        with _whole(trainer.train_dataloader, self._split) as data:
            history = fit_noise(self.field, data, self.steps, **self.options)
        if self.path is not None and trainer.is_global_zero:
            recipe = {"method": "retrofit", "noise_steps": self.steps, "epochs": trainer.current_epoch}
            checkpoint.save(self.field, self.path, recipe=recipe, metrics={"noise_loss": history[-1][1]})
        trainer.strategy.barrier()


class _Converted:
    """Batches of a loader as pairs of samples and conditions; iterable several times.

    Arguments:
        loader: The loader.
        convert: The function that returns the pair of a batch.
        count: The number of batches that are joined to one.
        sampler: A sampler that orders each pass by the number of the pass.
    """

    def __init__(self, loader: Any, convert: Convert, count: int = 1, sampler: Any = None) -> None:
        self.loader, self.convert, self.count, self._sampler = loader, convert, count, sampler
        self.passes = 0

    def __iter__(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        if self._sampler is not None:
            self._sampler.set_epoch(self.passes)
        self.passes += 1
        batches = map(self.convert, self.loader)
        while group := list(islice(batches, self.count)):
            yield _joined(group) if self.count > 1 else group[0]


@contextmanager
def _whole(loader: Any, convert: Convert) -> Iterator[_Converted]:
    """Yield the batches of the whole dataset, of which Lightning's sampler gives each process a part."""
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        yield _Converted(loader, convert)
        return
    before = dict(vars(sampler))
    vars(sampler).update(num_replicas=1, rank=0, num_samples=sampler.total_size)
    try:
        yield _Converted(loader, convert, before["num_replicas"], sampler)
    finally:
        vars(sampler).update(before)


def _joined(batches: Sequence[tuple[Any, dict[str, Any]]]) -> tuple[Any, dict[str, Tensor]]:
    """Concatenate batches and their conditions."""
    states, conds = zip(*batches, strict=True)
    x = tree_map(lambda *c: torch.cat(c), *states)
    return x, {name: torch.cat([torch.as_tensor(one[name]) for one in conds]) for name in conds[0]}
